"""Shares of a batch are pure values: against the grid of the layout, rank by rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.parallel.layout import ParallelLayout
from megappo.parallel.shares import Shares, shares_of

SMALL = st.sampled_from([1, 2, 3])


@given(tp=SMALL, cp=SMALL, dp=SMALL, pp=SMALL, placed=st.booleans(), seed=st.randoms(use_true_random=False))
def test_every_rank_has_the_share_of_its_replica_and_the_part_of_its_stage(tp, cp, dp, pp, placed, seed) -> None:
    layout = ParallelLayout(tp * cp * dp * pp, tp, pp, cp=cp)
    # A role on some ranks of a larger world, in any order.
    ranks = seed.sample(range(3 * layout.world_size), layout.world_size) if placed else None
    shares = shares_of(layout, ranks)
    world_rank = list(range(layout.world_size)) if ranks is None else ranks
    assert shares.count == dp and shares.stage == pp - 1
    for position in range(layout.world_size):
        at, rank = layout.coordinates(position), world_rank[position]
        assert shares.index_of(rank) == at.dp and rank in shares.members[at.dp]
        assert (rank in shares.holders[at.dp]) == (at.pp == pp - 1)
        assert (rank in shares.readers[at.dp]) == (at.pp == 0 < pp - 1)
        assert (rank in shares.reporters) == ((at.tp, at.cp, at.pp) == (0, 0, pp - 1))
    assert sum(map(len, shares.members)) == layout.world_size
    assert shares.reporters == tuple(world_rank[layout.rank_of(dp=dp_index, pp=pp - 1)] for dp_index in range(dp))


def test_shares_of_eight_ranks_by_hand() -> None:
    shares = shares_of(ParallelLayout(8, tp=2, pp=2), range(10, 18))
    assert shares.members == ((10, 11, 14, 15), (12, 13, 16, 17))
    assert shares.holders == ((14, 15), (16, 17)) and shares.readers == ((10, 11), (12, 13))
    assert shares.reporters == (14, 16)
    assert [shares.index_of(rank) for rank in (9, 10, 13, 14, 17, 18)] == [None, 0, 1, 0, 1, None]
    assert shares.describe(1) == "ranks 16-17 (stage 1)"


@pytest.mark.parametrize("ranks", [range(3), [4, 2]])
def test_shares_of_ranks_alone_and_of_all_together(ranks) -> None:
    alone, together = Shares.of_ranks(ranks), Shares.of_all(ranks)
    assert alone.members == alone.holders == tuple((rank,) for rank in ranks) and alone.reporters == tuple(ranks)
    assert [alone.index_of(rank) for rank in ranks] == list(range(len(ranks)))
    assert together.members == together.holders == (tuple(ranks),) and together.reporters == (ranks[0],)
    assert {together.index_of(rank) for rank in ranks} == {0} and together.count == 1
    assert not any(alone.readers) and not any(together.readers)


def test_ranks_of_a_world_alone_are_one_object() -> None:
    """No exchange builds or compares thousands of ranks."""
    alone = Shares.of_world(5)
    assert alone == Shares.of_ranks(range(5)) and hash(alone) == hash(Shares.of_ranks(range(5)))
    assert all(shares_of(ParallelLayout(5), ranks) is alone for ranks in (None, range(5), [0, 1, 2, 3, 4]))
    moved = [shares_of(ParallelLayout(5), ranks) for ranks in ([1, 0, 2, 3, 4], range(1, 6))]
    assert [one.reporters for one in moved] == [(1, 0, 2, 3, 4), (1, 2, 3, 4, 5)]


@pytest.mark.parametrize("layout", [ParallelLayout(4), ParallelLayout(8, tp=2), ParallelLayout(8, tp=2, pp=2)], ids=str)
def test_tensors_of_ranks_are_those_of_the_tuples(layout: ParallelLayout) -> None:
    shares = shares_of(layout, range(10, 10 + layout.world_size))
    assert shares.ranks_that_hold.tolist() == [list(ranks) for ranks in shares.holders]
    assert shares.ranks_that_read.tolist() == [[*a, *b] for a, b in zip(shares.holders, shares.readers)]


def test_shares_with_the_same_ranks_are_one_value() -> None:
    """Roles that divide a batch alike are sent it once."""
    layout = ParallelLayout(4, tp=2)
    assert len({shares_of(layout), shares_of(layout, [0, 1, 2, 3]), shares_of(ParallelLayout(4, cp=2))}) == 1
    assert shares_of(layout) != shares_of(ParallelLayout(4, pp=2))
