"""Balanced parts and micro-batch plans are pure values: their properties, over random lengths."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.parallel.shares import Units, partition_balanced, plan_micro_batches, split_by_budget

LENGTHS = st.lists(st.integers(1, 300), max_size=40)
# Few values: most loads tie.
TIES = st.lists(st.sampled_from([0, 1, 2]), max_size=60)


def by_a_heap_of_pairs(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Longest processing time first, word for word: ties go to the lower index, and to the lower part."""
    heap, parts = [(0, part) for part in range(num_parts)], [[] for _ in range(num_parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, part = heapq.heappop(heap)
        parts[part].append(index)
        heapq.heappush(heap, (load + lengths[index], part))
    return [sorted(part) for part in parts]


@given(lengths=st.one_of(LENGTHS, TIES), parts=st.integers(1, 20))
def test_parts_are_those_of_a_heap_of_pairs(lengths: list[int], parts: int) -> None:
    assert partition_balanced(lengths, parts) == by_a_heap_of_pairs(lengths, parts)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 1023, 1024, 1025])
def test_parts_of_many_long_sequences_are_those_of_a_heap_of_pairs(parts: int) -> None:
    lengths = [1 + i * 7919 % 131072 for i in range(3000)]
    assert partition_balanced(lengths, parts) == by_a_heap_of_pairs(lengths, parts)


@pytest.mark.parametrize("parts", [33, 200, 1000])
@pytest.mark.parametrize("kind", ["equal", "zero", "few giants", "halves", "one giant"])
def test_parts_of_lengths_that_differ_much_are_those_of_a_heap_of_pairs(kind: str, parts: int) -> None:
    """Whole rounds, rounds that end early, and sequences dealt one by one between them."""
    ordinary = [100 + i * 31 % 50 for i in range(2500)]
    lengths = {
        "equal": [7] * 2500,
        "zero": [0] * 1500 + [1] * 1000,
        "few giants": [length * (3000 if i % 97 == 0 else 1) for i, length in enumerate(ordinary)],
        "halves": [1 << (i % 12) for i in range(2500)],
        "one giant": [10**6, *ordinary],
    }[kind]
    assert partition_balanced(lengths, parts) == by_a_heap_of_pairs(lengths, parts)


@given(lengths=LENGTHS, parts=st.integers(1, 6))
def test_parts_are_balanced(lengths: list[int], parts: int) -> None:
    loads = [sum(lengths[i] for i in part) for part in partition_balanced(lengths, parts)]
    # Longest first puts the last item of the fullest part onto a part that was the emptiest.
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(lengths=LENGTHS, budget=st.integers(1, 600), least=st.integers(1, 50))
def test_micro_batches_cover_every_sequence_once_within_the_budget(lengths: list[int], budget: int, least: int) -> None:
    plan = plan_micro_batches(lengths, budget, least)
    assert sorted(i for micro in plan for i in micro) == list(range(len(lengths)))
    assert all(micro == sorted(micro) for micro in plan)
    for micro in plan:
        assert len(micro) <= 1 or sum(lengths[i] for i in micro) <= budget


@given(shares=st.lists(LENGTHS, min_size=1, max_size=6), budget=st.integers(1, 600))
def test_replicas_that_agree_on_the_largest_number_run_as_many_micro_batches(shares: list[list[int]], budget: int) -> None:
    most = max(split_by_budget(lengths, budget) for lengths in shares)
    assert {len(plan_micro_batches(lengths, budget, most)) for lengths in shares} == {most}


@given(lengths=LENGTHS, budget=st.integers(1, 600), least=st.integers(1, 50))
def test_as_many_micro_batches_as_asked_for_or_as_the_budget_needs(lengths: list[int], budget: int, least: int) -> None:
    assert len(plan_micro_batches(lengths, budget, least)) == max(least, split_by_budget(lengths, budget))


def test_no_more_micro_batches_than_needed() -> None:
    assert [len(plan_micro_batches([10] * 4, budget)) for budget in (40, 39)] == [1, 2]
    assert plan_micro_batches([10, 20, 30], 60, least=4) == [[2], [1], [0], []], "the rest is empty"
    assert plan_micro_batches([], 60) == [[]] and plan_micro_batches([], 60, least=2) == [[], []]


def test_sequences_that_one_loss_compares_stay_in_one_micro_batch() -> None:
    lengths, sizes = [7, 3, 4, 4, 2, 9, 1, 5], [2, 3, 1, 2]
    units = Units.of(torch.tensor(lengths), sizes)
    assert units.lengths == [10, 10, 9, 6]
    parts = units.sequences(plan_micro_batches(units.lengths, 16))
    groups = [{0, 1}, {2, 3, 4}, {5}, {6, 7}]
    assert all(any(group <= set(part) for part in parts) for group in groups) and sorted(sum(parts, [])) == list(range(8))
    assert all(sum(lengths[one] for one in part) <= 16 for part in parts)
    alone = Units.of(torch.tensor(lengths), ())
    assert alone.lengths == lengths and alone.sequences([[1, 0], [2]]) == [[1, 0], [2]]
    apart = plan_micro_batches(lengths, 16)
    assert not all(any(group <= set(part) for part in apart) for group in groups), "negative control"
