"""Rank grids are pure values: their properties, over random sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.parallel.layout import ParallelLayout

SMALL = st.sampled_from([1, 2, 3, 4])


@given(tp=SMALL, cp=SMALL, dp=SMALL, pp=SMALL)
def test_coordinates_and_ranks_are_inverse(tp: int, cp: int, dp: int, pp: int) -> None:
    layout = ParallelLayout(tp * cp * dp * pp, tp, pp, cp=cp)
    assert layout.dp == dp
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        assert layout.rank_of(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank


@given(tp=SMALL, cp=SMALL, dp=SMALL, pp=SMALL, axes=st.sets(st.sampled_from(["tp", "cp", "dp", "pp"]), min_size=1))
def test_axis_groups_partition_the_world_and_differ_only_in_their_axes(tp: int, cp: int, dp: int, pp: int, axes: set[str]) -> None:
    layout = ParallelLayout(tp * cp * dp * pp, tp, pp, cp=cp)
    groups = layout.axis_groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for group in groups:
        places = [layout.coordinates(rank) for rank in group]
        for axis in {"tp", "cp", "dp", "pp"} - axes:
            assert len({getattr(at, axis) for at in places}) == 1


@given(dp=SMALL, pp=SMALL, etp=SMALL, ep=SMALL)
def test_experts_cut_the_ranks_of_a_stage_into_their_own_grid(dp: int, pp: int, etp: int, ep: int) -> None:
    layout = ParallelLayout(4 * dp * pp, tp=2, cp=2, pp=pp, etp=etp, ep=ep) if 4 * dp % (etp * ep) == 0 else None
    if layout is None:
        return
    places = {(at.etp, at.ep, at.edp, at.pp) for at in map(layout.coordinates, range(layout.world_size))}
    assert len(places) == layout.world_size == etp * ep * layout.edp * pp
    for group in layout.axis_groups("etp", "ep", "edp"):
        assert len({layout.coordinates(rank).pp for rank in group}) == 1


def test_tp_groups_are_neighbours() -> None:
    assert ParallelLayout(8, tp=2, pp=2).axis_groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ParallelLayout(8, tp=2, pp=2).axis_groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(world_size=6, tp=4), "tp 4 x pp 1 = 4 does not divide the 6 ranks"),
        (dict(world_size=2, sequence_parallel=True), "sequence_parallel needs tp > 1"),
        (dict(world_size=6, tp=2, cp=2), "tp 2 x cp 2 x pp 1 = 4 does not divide the 6 ranks"),
        (dict(world_size=4, pp=2, ep=4), r"etp 1 x ep 4 = 4 does not divide the 2 ranks of a pipeline stage"),
        (dict(world_size=2, vpp=2), "vpp 2 interleaves pipeline stages and needs pp > 1"),
        (dict(world_size=2, pp=2, layers_per_stage=(1, 2, 3)), "layers_per_stage has 3 entries; pp 2 x vpp 1 needs 2"),
    ],
)
def test_impossible_layouts_say_why(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelLayout(**arguments)


def test_layers_are_cut_into_equal_stages() -> None:
    layout = ParallelLayout(3, pp=3)
    assert [list(layout.stage_layers(6, stage)) for stage in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="7 layers are not divisible by pp 2; set layers_per_stage"):
        ParallelLayout(2, pp=2).chunk_layers(7, 0)


def test_chunks_of_an_interleaved_pipeline_alternate_between_the_stages() -> None:
    layout = ParallelLayout(2, pp=2, vpp=2)
    assert [list(layout.stage_layers(8, stage)) for stage in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    uneven = ParallelLayout(2, pp=2, vpp=2, layers_per_stage=(1, 3, 2, 2))
    assert [list(uneven.stage_layers(8, stage)) for stage in range(2)] == [[0, 4, 5], [1, 2, 3, 6, 7]]
    with pytest.raises(ValueError, match=r"layers_per_stage \[1, 3, 2, 2\] adds up to 8, the model has 9 layers"):
        uneven.chunk_layers(9, 0)
