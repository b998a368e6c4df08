"""Assignment of sequences to data-parallel ranks and micro-batches.

Pure functions of the sequence lengths, so every rank computes the same plan without communication. All data-parallel ranks get
the same number of micro-batches, as pipeline schedules and gradient reduction need; a rank with fewer sequences gets empty ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

# plan[dp rank][micro-batch] = indices of sequences, ascending
MicroBatchPlan = list[list[list[int]]]


def partition_balanced(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Partition indices into `num_parts` parts of nearly equal token count; ties by index."""
    heap = [(0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    # Longest processing time first (Graham 1969): at most 4/3 of the optimal load.
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, part = heapq.heappop(heap)
        parts[part].append(index)
        heapq.heappush(heap, (load + lengths[index], part))
    return [sorted(part) for part in parts]


def split_by_budget(lengths: Sequence[int], token_budget: int) -> int:
    """Smallest number (at least 1) of balanced parts within the budget; a sequence longer than the budget is alone in a part."""
    total = sum(min(length, token_budget) for length in lengths)
    num_parts = max(1, -(-total // token_budget))  # lower bound: all parts full
    while num_parts < len(lengths) and not _fits(lengths, num_parts, token_budget):
        num_parts += 1
    return num_parts


def _fits(lengths: Sequence[int], num_parts: int, token_budget: int) -> bool:
    parts = partition_balanced(lengths, num_parts)
    return all(len(part) <= 1 or sum(lengths[i] for i in part) <= token_budget for part in parts)


def plan_micro_batches(lengths: Sequence[int], num_dp: int, token_budget: int, multiple: int = 1) -> MicroBatchPlan:
    """Balance sequences by tokens over data-parallel ranks, and cut each rank's into the same number of micro-batches.

    Micro-batches stay within the token budget. Their number is a multiple of `multiple` (pp of an interleaved schedule); with
    fewer sequences some are empty.
    """
    per_rank = partition_balanced(lengths, num_dp)
    # The rank that needs most decides for all.
    num_micro = max(split_by_budget([lengths[i] for i in part], token_budget) for part in per_rank)
    num_micro = -(-num_micro // multiple) * multiple
    plan = []
    for part in per_rank:
        local = partition_balanced([lengths[i] for i in part], num_micro)
        plan.append([[part[i] for i in micro] for micro in local])
    return plan
