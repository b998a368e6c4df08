"""Assignment of sequences to data-parallel ranks and micro-batches: pure functions of the sequence lengths, so every rank that
knows them computes the same plan without communication."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

# A round of `parts_balanced` takes 5 us however many sequences it places, a heap step 0.25 us.
FEWEST_OF_A_ROUND = 32
AT_ONCE_BY_HEAP = 1024


def partition_balanced(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Partition indices into `num_parts` parts of nearly equal token count; ties by index."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for index, part in enumerate(parts_balanced(numpy.array(lengths, dtype=numpy.int64), num_parts).tolist()):
        parts[part].append(index)
    return parts


def parts_balanced(lengths: NDArray[numpy.int64], num_parts: int) -> NDArray[numpy.int64]:
    """Return the part of every index in `partition_balanced`. lengths, result: [N] int64. In rounds, parts in ascending order of
    load each take the next sequence, up to the first part that is heavier than one that has taken already: the heap's result in a
    tenth of its time, as every rank plans for all samples of a step."""
    if num_parts == 1:
        return numpy.zeros_like(lengths)
    order = _longest_first(lengths)
    bits = (num_parts - 1).bit_length()
    # A load and its part in one integer: one sort orders both, and the lower of two equal parts comes first.
    sizes, loads = lengths[order] << bits, numpy.arange(num_parts)
    given = numpy.empty_like(sizes)
    done = 0
    while done < len(sizes):
        loads.sort()
        wanting = sizes[done : done + num_parts]
        lightest = loads[: len(wanting)]
        taken = lightest + wanting
        count = len(wanting)
        if lightest[-1] > taken.min():  # else no need to look closer
            is_late = lightest[1:] > numpy.minimum.accumulate(taken)[:-1]
            count = int(is_late.argmax()) + 1 if is_late.any() else count
        if count >= FEWEST_OF_A_ROUND or count == len(sizes) - done:
            given[done : done + count] = lightest[:count]
            loads[:count] = taken[:count]
        else:  # few parts, or parts that differ much
            count = min(AT_ONCE_BY_HEAP, len(sizes) - done)
            given[done : done + count], loads = _by_heap(sizes[done : done + count], loads)
        done += count
    found = numpy.empty_like(order)
    found[order] = given & ((1 << bits) - 1)
    return found


def _longest_first(lengths: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
    """Return indices by descending length, equal ones ascending: longest processing time first (Graham 1969), at most 4/3 of the
    optimal load."""
    bits = len(lengths).bit_length()
    # Ten times faster than a stable sort of indices by their lengths.
    keys = ((lengths.max(initial=0) - lengths) << bits) | numpy.arange(len(lengths))
    keys.sort()
    return keys & ((1 << bits) - 1)


def _by_heap(sizes: NDArray[numpy.int64], loads: NDArray[numpy.int64]) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
    """Add each size to the lightest load; return the load [M] that each was added to, and the loads [P] after. loads: ascending."""
    heap, given = loads.tolist(), []
    for size in sizes.tolist():
        given.append(heap[0])
        heapq.heapreplace(heap, heap[0] + size)
    return numpy.array(given), numpy.array(heap)


def split_by_budget(lengths: Sequence[int], token_budget: int) -> int:
    """Return the smallest number (at least 1) of balanced parts within the budget; a sequence longer than it is alone in a part."""
    total = sum(min(length, token_budget) for length in lengths)
    num_parts = max(1, -(-total // token_budget))  # lower bound: all parts full
    while num_parts < len(lengths) and not _fits(lengths, num_parts, token_budget):
        num_parts += 1
    return num_parts


def _fits(lengths: Sequence[int], num_parts: int, token_budget: int) -> bool:
    parts = partition_balanced(lengths, num_parts)
    return all(len(part) <= 1 or sum(lengths[i] for i in part) <= token_budget for part in parts)


def plan_micro_batches(lengths: Sequence[int], token_budget: int, least: int = 1) -> list[list[int]]:
    """Cut the sequences of one model replica into at least `least` micro-batches within the budget, some perhaps empty; return the
    indices of each, ascending."""
    return partition_balanced(lengths, max(least, split_by_budget(lengths, token_budget)))
