"""The plan as pure arithmetic: it fills every engine parameter exactly, from any layout, and says what it cannot do."""

from __future__ import annotations

import dataclasses
import random
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megappo.bridge.plan import Move, digest, make_buckets, make_plan, module_of
from megappo.bridge.transfer import Round
from megappo.models.arch import ModelArch
from megappo.models.pieces import Box, Piece
from megappo.models.weight_map import pieces_by_rank
from megappo.parallel.layout import ParallelLayout

from .engines import arch_like, engine_destination, engine_pieces, engine_tensors, policy_tensors, random_checkpoint

ARCHS = {
    "llama": arch_like("llama"),
    "one_kv_head": arch_like("llama", num_kv_heads=1),
    "qwen2_tied": arch_like("qwen2", tied_embeddings=True),
    "qwen3": arch_like("qwen3", num_kv_heads=4),
    "qwen3_moe": arch_like("qwen3_moe", num_kv_heads=4),
}
# train layout, engine tp
LAYOUTS = [
    (ParallelLayout(1), 1),
    (ParallelLayout(2, tp=2), 1),
    (ParallelLayout(2, tp=2), 2),
    (ParallelLayout(2, pp=2), 1),
    (ParallelLayout(4, tp=2, pp=2), 2),
    (ParallelLayout(4, pp=4), 4),
    (ParallelLayout(4, tp=4), 2),
    (ParallelLayout(8, tp=2, pp=2), 4),
    (ParallelLayout(8, tp=2, pp=2), 1),
    (ParallelLayout(4), 4),
    (ParallelLayout(2, pp=2, vpp=2), 2),
    (ParallelLayout(2, pp=2, layers_per_stage=(3, 1)), 1),
    (ParallelLayout(4, tp=2, cp=2), 4),
    (ParallelLayout(4, pp=2, vpp=2, layers_per_stage=(0, 2, 1, 1)), 2),
    (ParallelLayout(8, tp=2, cp=2, pp=2, vpp=2), 2),
]
EXPERT_LAYOUTS = [
    (ParallelLayout(2, ep=2), 1),
    (ParallelLayout(2, etp=2), 2),
    (ParallelLayout(4, ep=4), 2),
    (ParallelLayout(4, ep=2, etp=2), 4),
    (ParallelLayout(8, tp=2, pp=2, ep=2), 2),
    (ParallelLayout(8, cp=2, pp=2, vpp=2, ep=2, etp=2), 4),
    (ParallelLayout(8, tp=4, ep=2, etp=1), 1),
]
CASES = [
    pytest.param(arch, layout, engine_tp, id=f"{name} {layout} of {layout.world_size} to tp{engine_tp}")
    for name, arch in ARCHS.items()
    for layout, engine_tp in LAYOUTS + (EXPERT_LAYOUTS if arch.moe else [])
    if arch.num_kv_heads % layout.tp == 0
]


def both_sides(arch: ModelArch, layout: ParallelLayout, engine_tp: int) -> tuple[dict, dict]:
    destinations = {rank: list(engine_pieces(arch, engine_tp, rank % engine_tp)) for rank in range(layout.world_size)}
    return pieces_by_rank(arch, layout), destinations


def carry_out(plan: list[Move], arch: ModelArch, layout: ParallelLayout, engine_tp: int, checkpoint: dict) -> dict[int, dict]:
    """Weights of the engines after the moves, done one by one on plain tensors."""
    ranks = range(layout.world_size)
    held = [policy_tensors(arch, layout, rank, checkpoint) for rank in ranks]
    wanted = {rank: engine_tensors(arch, checkpoint, engine_tp, rank % engine_tp) for rank in ranks}
    got = {rank: {name: torch.zeros_like(tensor) for name, tensor in wanted[rank].items()} for rank in ranks}
    for m in plan:
        source, target = held[m.src][m.source], got[m.dst][m.target]
        target = target[m.d_slot] if target.dim() == 3 else target
        if source.dim() == 1:
            target[m.d_row : m.d_row + m.rows] = source[m.s_row : m.s_row + m.rows]
        else:
            target[m.d_row : m.d_row + m.rows, m.d_col : m.d_col + m.cols] = source[
                m.s_row : m.s_row + m.rows, m.s_col : m.s_col + m.cols
            ]
    return got


def differing(got: dict[int, dict], arch: ModelArch, engine_tp: int, checkpoint: dict) -> list[str]:
    return [
        f"rank {rank} {name}"
        for rank, tensors in got.items()
        for name, want in engine_tensors(arch, checkpoint, engine_tp, rank % engine_tp).items()
        if not torch.equal(tensors[name], want)
    ]


@pytest.mark.parametrize("arch, layout, engine_tp", CASES)
def test_any_layout_fills_the_engine_exactly(arch, layout, engine_tp):
    check_plan(arch, layout, engine_tp)


def check_plan(arch: ModelArch, layout: ParallelLayout, engine_tp: int) -> None:
    checkpoint = random_checkpoint(arch, 0)
    sources, destinations = both_sides(arch, layout, engine_tp)
    plan = make_plan(sources, destinations, itemsize=2)
    assert differing(carry_out(plan, arch, layout, engine_tp, checkpoint), arch, engine_tp, checkpoint) == []
    own = {rank: {(piece.hf, piece.box) for piece in pieces} for rank, pieces in sources.items()}
    for rank in range(layout.world_size):
        arriving = [move for move in plan if move.dst == rank]
        wanted = sum(piece.box.area for piece in destinations[rank])
        assert sum(move.numel for move in arriving) == wanted, "no element is sent twice"
        # The names of sources are unique per rank and box: what a rank holds itself never comes from a replica.
        remote = [(move.hf, source_box(move, sources[move.src])) for move in arriving if move.src != rank]
        assert not own[rank] & set(remote)


def source_box(move: Move, held: list[Piece]) -> Box:
    """The box of the source's piece that a move is cut out of."""
    return next(
        piece.box
        for piece in held
        if (piece.hf, piece.local) == (move.hf, move.source)
        and piece.row <= move.s_row < piece.row + piece.box.rows
        and piece.col <= move.s_col < piece.col + piece.box.cols
    )


@st.composite
def random_layouts(draw: st.DrawFn) -> ParallelLayout:
    """Any layout of up to 16 ranks that the 4 layers and 8 experts of the table's models allow."""
    sizes = {
        axis: draw(st.sampled_from(choices))
        for axis, choices in (
            ("tp", (1, 2, 4)),
            ("cp", (1, 2)),
            ("pp", (1, 2, 4)),
            ("vpp", (1, 2)),
            ("ep", (1, 2, 4)),
            ("etp", (1, 2)),
        )
    }
    if sizes["pp"] == 1:
        sizes["vpp"] = 1
    inside = sizes["tp"] * sizes["cp"]
    dp = max(1, sizes["ep"] * sizes["etp"] // inside)
    parts = sizes["pp"] * sizes["vpp"]
    ends = sorted(draw(st.lists(st.integers(0, 4), min_size=parts - 1, max_size=parts - 1)))
    split = tuple(b - a for a, b in zip([0, *ends], [*ends, 4]))
    return ParallelLayout(inside * dp * sizes["pp"], **sizes, layers_per_stage=split)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_layouts(), st.sampled_from((1, 2, 4)), st.sampled_from(("llama", "qwen3_moe")), st.booleans())
def test_random_layouts_fill_the_engine_exactly(layout, engine_tp, family, tied):
    arch = arch_like(family, num_kv_heads=4, tied_embeddings=tied)
    if arch.moe is None:
        layout = dataclasses.replace(layout, ep=1, etp=1)
    if layout.world_size % engine_tp == 0:
        check_plan(arch, layout, engine_tp)


def test_experts_that_are_cut_alike_stay_where_they_are():
    """etp 2 on one side and tp 2 on the other cut every expert the same way; ep 2 keeps half of all experts on each rank."""
    arch = ARCHS["qwen3_moe"]
    expert = lambda plan: [move for move in plan if ".experts." in move.hf]
    alike = expert(make_plan(*both_sides(arch, ParallelLayout(2, etp=2), 2), itemsize=2))
    assert alike and all(move.src == move.dst for move in alike)
    spread = expert(make_plan(*both_sides(arch, ParallelLayout(2, ep=2), 1), itemsize=2))
    per_rank = sum(move.numel for move in spread) // 2
    for rank in range(2):
        assert sum(move.numel for move in spread if move.dst == rank != move.src) == per_rank // 2


@pytest.mark.parametrize(
    "spoil, family, layout",
    [
        *((spoil, "llama", ParallelLayout(2, tp=2)) for spoil in ("drop", "shift", "swap")),
        *((spoil, "qwen3_moe", ParallelLayout(2, ep=2)) for spoil in ("drop", "shift", "swap", "slot")),
    ],
)
def test_a_spoilt_plan_is_seen_by_that_comparison(spoil, family, layout):
    arch = ARCHS[family]
    checkpoint = random_checkpoint(arch, 0)
    plan = make_plan(*both_sides(arch, layout, 1), itemsize=2)
    victim = next(i for i, move in enumerate(plan) if "gate_proj" in move.hf)
    partner = next(i for i, move in enumerate(plan) if "up_proj" in move.hf)
    if spoil == "drop":
        del plan[victim]
    elif spoil == "slot":
        victim = next(i for i, move in enumerate(plan) if move.d_slot == 3)
        plan[victim] = plan[victim]._replace(d_slot=4)
    elif spoil == "shift":
        plan[victim] = plan[victim]._replace(d_row=plan[victim].d_row + 1)
    else:
        a, b = plan[victim], plan[partner]
        plan[victim], plan[partner] = a._replace(d_row=b.d_row), b._replace(d_row=a.d_row)
    assert differing(carry_out(plan, arch, layout, 1, checkpoint), arch, 1, checkpoint)


@pytest.mark.parametrize(
    "ranks, engine_tp, remote_share",
    [
        ((2, 2, 1), 2, 0.0),  # same cut: nothing travels
        ((4, 1, 1), 1, 0.0),  # every rank holds all
        ((4, 1, 1), 4, 0.0),
    ],
)
def test_what_a_rank_holds_itself_never_travels(ranks, engine_tp, remote_share):
    plan = make_plan(*both_sides(arch_like("llama", vocab_size=64), ParallelLayout(*ranks), engine_tp), itemsize=2)
    remote = sum(move.numel for move in plan if move.src != move.dst)
    assert remote / sum(move.numel for move in plan) == remote_share


def test_a_pipeline_sends_what_the_other_stages_hold():
    arch, layout = arch_like("llama"), ParallelLayout(4, pp=4)
    plan = make_plan(*both_sides(arch, layout, 1), itemsize=2)
    total = sum(piece.box.area for piece in engine_pieces(arch, 1, 0))
    for rank in range(4):
        held = sum(piece.box.area for piece in pieces_by_rank(arch, layout)[rank])
        assert sum(move.numel for move in plan if move.dst == rank and move.src != rank) == total - held


def test_senders_of_equal_pieces_share_the_load():
    boxes = [Piece(f"t{i}", Box(0, 1 + i % 5, 0, 8), f"t{i}", 0, 0) for i in range(200)]
    plan = make_plan(dict.fromkeys(range(4), boxes), dict.fromkeys(range(4, 8), boxes), itemsize=2)
    sent = [sum(move.numel for move in plan if move.src == rank) for rank in range(4)]
    assert max(sent) - min(sent) <= max(piece.box.area for piece in boxes)


def test_a_sender_of_the_same_node_is_preferred():
    piece = Piece("t", Box(0, 8, 0, 8), "t", 0, 0)
    plan = make_plan({0: [piece], 5: [piece]}, {rank: [piece] for rank in range(8)}, itemsize=2, ranks_per_node=4)
    assert [move.src for move in plan] == [0, 0, 0, 0, 5, 5, 5, 5]


def test_the_plan_depends_on_the_layouts_only():
    arch, layout = ARCHS["qwen2_tied"], ParallelLayout(4, tp=2, pp=2)
    sources, destinations = both_sides(arch, layout, 2)
    plan = make_plan(sources, destinations, itemsize=2)
    shuffled = list(sources.items())
    random.Random(0).shuffle(shuffled)
    assert digest(make_plan(dict(shuffled), dict(reversed(destinations.items())), itemsize=2)) == digest(plan)
    other = make_plan(*both_sides(arch, ParallelLayout(4, pp=4), 2), itemsize=2)
    assert digest(other) != digest(plan)
    assert digest([plan[0]._replace(d_row=plan[0].d_row + 1), *plan[1:]]) != digest(plan)


WHOLE = Piece("w", Box(0, 8, 0, 4), "e.w", 0, 0)


@pytest.mark.parametrize(
    "held, message",
    [
        ([], "w -> e.w of rank 0: 0 of 32 elements have a source"),
        ([Box(0, 4, 0, 4)], "w -> e.w of rank 0: 16 of 32 elements have a source"),
        ([Box(0, 4, 0, 4), Box(5, 8, 0, 4)], "28 of 32"),
        ([Box(0, 5, 0, 4), Box(4, 8, 0, 4)], "(0, 5, 0, 4) and (4, 8, 0, 4) overlap"),
        ([Box(0, 8, 0, 3), Box(0, 8, 2, 4)], "overlap"),
        ([Box(0, 6, 0, 4), Box(0, 2, 0, 2), Box(6, 8, 0, 2)], "overlap"),  # areas add up to 32 although a corner is missing
    ],
)
def test_sources_that_do_not_tile_a_destination_are_refused(held, message):
    sources = {rank: [Piece("w", box, "w", 0, 0)] for rank, box in enumerate(held)}
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan(sources, {0: [WHOLE]}, itemsize=2)


def cuts(size: int) -> st.SearchStrategy[list[int]]:
    return st.sets(st.integers(1, size - 1), max_size=3).map(lambda inner: [0, *sorted(inner), size])


@settings(max_examples=150, deadline=None)
@given(cuts(12), cuts(9), cuts(12), cuts(9), st.integers(1, 4))
def test_random_grids_meet_exactly(source_rows, source_cols, wanted_rows, wanted_cols, ranks):
    """A 12 x 9 tensor cut into one random grid on the sending side and another on the receiving side."""

    def grid(rows, cols, name):
        boxes = [Box(r0, r1, c0, c1) for r0, r1 in zip(rows, rows[1:]) for c0, c1 in zip(cols, cols[1:])]
        return [Piece("w", box, f"{name}.{i}", 0, 0) for i, box in enumerate(boxes)]

    full = torch.arange(12 * 9).view(12, 9)
    source, wanted = grid(source_rows, source_cols, "s"), grid(wanted_rows, wanted_cols, "d")
    sources = {rank: source[rank::ranks] for rank in range(ranks)}
    got = {piece.local: torch.full((piece.box.rows, piece.box.cols), -1) for piece in wanted}
    held = {piece.local: full[piece.box.r0 : piece.box.r1, piece.box.c0 : piece.box.c1] for piece in source}
    for m in make_plan(sources, {0: wanted}, itemsize=4):
        got[m.target][m.d_row : m.d_row + m.rows, m.d_col : m.d_col + m.cols] = held[m.source][
            m.s_row : m.s_row + m.rows, m.s_col : m.s_col + m.cols
        ]
    for piece in wanted:
        assert torch.equal(got[piece.local], full[piece.box.r0 : piece.box.r1, piece.box.c0 : piece.box.c1])


@pytest.mark.parametrize("cap", [1, 2000, 1 << 20])
def test_buckets_hold_every_move_once_within_the_cap(cap):
    arch, layout = ARCHS["llama"], ParallelLayout(4, tp=2, pp=2)
    plan = make_plan(*both_sides(arch, layout, 2), itemsize=2)
    order = engine_destination(arch, 2, 0, torch.bfloat16).modules
    buckets = make_buckets(plan, order, 2, cap)
    assert sorted(move for bucket in buckets for move in bucket) == sorted(plan)
    modules = [list(dict.fromkeys(module_of(move.target) for move in bucket)) for bucket in buckets]
    seen = [name for names in modules for name in names]
    assert seen == [name for name in order if name in set(seen)], "modules come in order, each in one bucket"
    for bucket, names in zip(buckets, modules):
        for rank in range(4):
            sent = 2 * sum(move.numel for move in bucket if move.src == rank != move.dst)
            received = 2 * sum(move.numel for move in bucket if move.dst == rank != move.src)
            assert max(sent, received) <= cap or len(names) == 1
    if cap == 2000:
        assert 1 < len(buckets) < len(seen)
    else:
        assert len(buckets) == {1: len(seen), 1 << 20: 1}[cap]


def test_both_ends_of_a_round_agree():
    arch, layout = ARCHS["qwen3"], ParallelLayout(4, tp=2, pp=2)
    plan = make_plan(*both_sides(arch, layout, 1), itemsize=2)
    rounds = [Round.of(plan, rank, 4) for rank in range(4)]
    for a in range(4):
        for b in range(4):
            assert rounds[a].outgoing[b] == rounds[b].incoming[a]
    kept = [move for one in rounds for move in one.local] + [move for one in rounds for moves in one.incoming for move in moves]
    assert sorted(kept) == sorted(plan)


def test_a_destination_must_be_covered_by_pieces_and_constants():
    whole = engine_destination(ARCHS["llama"], 2, 1, torch.bfloat16)
    whole.check_complete()
    with pytest.raises(ValueError, match="engine parameter .*embed_tokens"):
        dataclasses.replace(whole, fills=()).check_complete()
    with pytest.raises(ValueError, match="engine parameter"):
        dataclasses.replace(whole, pieces=whole.pieces[:-1]).check_complete()
    with pytest.raises(ValueError, match="overlap"):
        dataclasses.replace(whole, pieces=(*whole.pieces, whole.pieces[-1])).check_complete()
