"""Placement: positions of a layout and ranks of the world."""

import pytest

from megappo.parallel.layout import Placement, placement_of


def test_positions_and_ranks_are_inverse():
    placement = placement_of("1-2,5", 8)
    assert placement.ranks == (1, 2, 5) and len(placement) == 3
    assert [placement.rank_of(position) for position in range(3)] == [1, 2, 5]
    assert [placement.position_of(rank) for rank in placement.ranks] == [0, 1, 2]
    assert placement.ranks_of([2, 0]) == [5, 1]
    assert [rank for rank in range(8) if rank in placement] == [1, 2, 5]
    with pytest.raises(KeyError):
        placement.position_of(0)


def test_the_whole_world_is_one_value_however_it_is_written():
    assert placement_of("all", 4) == placement_of("0-3", 4) == placement_of("0-1,2,3", 4) == Placement.whole(4)
    assert Placement.whole(4).is_whole and str(Placement.whole(4)) == "all"
    assert not placement_of("0-3", 5).is_whole and str(placement_of("0-1,2,4", 5)) == "0-2,4"
    assert len({placement_of("all", 4), placement_of("0-3", 4)}) == 1, "usable as a key"


def test_overlap_is_a_shared_rank():
    policy, critic, reference = (placement_of(ranks, 4) for ranks in ("0-1", "2-3", "1-2"))
    assert not policy.overlaps(critic) and policy.overlaps(reference) and reference.overlaps(critic)


@pytest.mark.parametrize("ranks", [(), (1, 1), (2, 1), (-1,), (4,)])
def test_ranks_that_are_no_placement_are_refused(ranks):
    with pytest.raises(ValueError, match="rank"):
        Placement(ranks, 4)


def test_ranks_outside_the_world_are_refused_with_its_ranks():
    with pytest.raises(ValueError, match="4-5 is outside the world, which has ranks 0-3"):
        placement_of("0-1,4-5", 4)
