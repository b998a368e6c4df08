"""Who takes which request of a batch, and what predicted lengths change about it."""

from __future__ import annotations

import pytest

from benchmarks.bench_dealing import drawn_lengths, end_of_last
from megappo.rollout.generation import deal

LENGTHS = [float((37 * number) % 101) for number in range(100)]


def deals(count, replicas, size, predicted=None):
    return [deal(count, replicas, index, size, predicted) for index in range(replicas)]


@pytest.mark.parametrize("predicted", [None, LENGTHS])
@pytest.mark.parametrize(("replicas", "size"), [(4, 8), (3, 1), (2, 49), (2, 50), (4, None), (1, 7)])
def test_every_request_is_dealt_once_and_the_replicas_agree_on_what_waits(replicas, size, predicted):
    found = deals(100, replicas, size, predicted)
    assert len({tuple(one.shared) for one in found}) == 1
    assert sorted([number for one in found for number in one.own] + list(found[0].shared)) == list(range(100))
    if found[0].shared:
        assert all(len(one.own) == size for one in found)


def test_the_longest_begin_and_the_shortest_wait_till_the_end():
    found = deals(100, 4, 8, LENGTHS)
    begun, waiting = [LENGTHS[n] for one in found for n in one.own], [LENGTHS[n] for n in found[0].shared]
    assert min(begun) >= max(waiting) and waiting == sorted(waiting, reverse=True)
    sums = [sum(LENGTHS[number] for number in one.own) for one in found]
    assert max(sums) - min(sums) <= max(begun) - min(begun)


def test_requests_of_equal_prediction_keep_their_order():
    """Samples of one prompt are taken together, and share their cached prefix."""
    found = deals(12, 2, 2, [5.0] * 4 + [7.0] * 4 + [6.0] * 4)
    assert list(found[0].shared) == [8, 9, 10, 11, 0, 1, 2, 3] and sorted([*found[0].own, *found[1].own]) == [4, 5, 6, 7]


@pytest.mark.parametrize(("replicas", "size"), [(1, 8), (4, 25), (4, None)])
def test_what_needs_no_waiting_is_dealt_without_a_history(replicas, size):
    """A resumed run has none, and repeats itself to the bit."""
    assert deals(100, replicas, size, LENGTHS) == deals(100, replicas, size)


def test_the_last_replica_ends_earlier_by_earlier_responses_and_not_by_wrong_ones():
    in_order, by_earlier, by_wrong = [], [], []
    for seed in range(3):
        lengths, earlier = drawn_lengths(32, 8, seed, over_prompts=1.0, over_samples=0.3)
        for ends, predicted in ((in_order, None), (by_earlier, earlier), (by_wrong, -earlier)):
            ends.append(end_of_last(lengths, predicted, 4, 8))
    assert sum(by_earlier) < 0.9 * sum(in_order) < sum(by_wrong)
