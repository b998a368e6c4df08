"""The plan as pure arithmetic: it fills every engine parameter exactly, from any layout, and says what it cannot do."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megappo.bridge.destination import Destination, Move, Shape
from megappo.bridge.plan import Ends, RankPlan, plan_rank
from megappo.bridge.target import Target
from megappo.bridge.transfer import Round, agree_rounds
from megappo.models.arch import ModelArch
from megappo.models.pieces import Box, Piece, PieceMap
from megappo.models.weight_map import megatron_pieces, piece_map
from megappo.parallel.layout import ParallelLayout
from tests.bridge.engines import arch_like, engine_destination, engine_pieces, engine_tensors, policy_tensors, random_checkpoint
from tests.bridge.geometries import DEEPSEEK_V3, QWEN3_235B, large_ends

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
    (arch, layout, engine_tp)
    for arch in ARCHS.values()
    for layout, engine_tp in LAYOUTS + (EXPERT_LAYOUTS if arch.moe else [])
    if arch.num_kv_heads % layout.tp == 0
]


def ends_of(arch: ModelArch, layout: ParallelLayout, engine_tp: int, destinations: tuple[int, ...] = (), node: int = 1) -> Ends:
    """Both ends on the ranks of the layout, or the engine on other ranks; its descriptions as they come over the wire."""
    pieces, sources = piece_map(arch, layout), tuple(range(layout.world_size))
    described = [engine_destination(arch, engine_tp, tp_rank, torch.bfloat16) for tp_rank in range(engine_tp)]
    targets = tuple(Target.decode(Target.of(one, pieces).encode()) for one in described)
    return Ends(pieces, sources, destinations or sources, targets, node)


def listed_ends(sources: dict[int, list[Piece]], wanted: list[Piece], destinations: tuple[int, ...], node: int = 1) -> Ends:
    """Ends from lists of pieces, with one engine rank for a replica."""
    pieces = PieceMap.of(dict(enumerate(sources.values())))
    sizes: dict[str, Shape] = {}
    for piece in wanted:
        _, rows, cols = sizes.get(piece.local, (1, 0, 0))
        sizes[piece.local] = Shape(1, max(rows, piece.row + piece.box.rows), max(cols, piece.col + piece.box.cols))
    target = Target.of(Destination(tuple(wanted), (), sizes, torch.bfloat16), pieces)
    return Ends(pieces, tuple(sources), destinations, (target,), node)


def plans_of(ends: Ends) -> dict[int, RankPlan]:
    return {rank: plan_rank(ends, rank) for rank in sorted({*ends.sources, *ends.destinations})}


def whole_plan(ends: Ends) -> list[Move]:
    """The moves of all ranks, each found by both its ends, in the same order and with the same proof."""
    plans = plans_of(ends)
    for a, sender in plans.items():
        for b, receiver in plans.items():
            if a != b:
                assert [m for m in sender.outgoing if m.dst == b] == [m for m in receiver.incoming if m.src == a]
                assert sender.sent.get(b) == receiver.received.get(a)
    assert len({plan.steps for plan in plans.values()}) == 1
    return [move for plan in plans.values() for move in plan.incoming]


def carry_out(plan: list[Move], arch: ModelArch, layout: ParallelLayout, engine_tp: int, checkpoint: dict) -> dict[int, dict]:
    """Weights of the engines after the moves, done one by one on plain tensors."""
    held = [policy_tensors(arch, layout, rank, checkpoint) for rank in range(layout.world_size)]
    ranks = sorted({move.dst for move in plan})
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


def test_any_layout_fills_the_engine_exactly():
    for case in CASES:
        try:
            check_plan(*case)
        except AssertionError as error:
            error.add_note(f"of {case}")
            raise


def check_plan(arch: ModelArch, layout: ParallelLayout, engine_tp: int) -> None:
    """Against tensors cut out of a checkpoint; colocated, with the engine on half of the ranks, and on ranks of its own."""
    checkpoint, world = random_checkpoint(arch, 0), layout.world_size
    sources = {rank: megatron_pieces(arch, layout, rank) for rank in range(world)}
    own = {rank: {(piece.hf, piece.box) for piece in pieces} for rank, pieces in sources.items()}
    apart = tuple(range(world, world + engine_tp))
    half = tuple(range(engine_tp * (world // engine_tp // 2)))  # replicas stand on multiples of engine_tp in all of them
    for destinations in {tuple(range(world)), half or tuple(range(world)), tuple(rank + -world % engine_tp for rank in apart)}:
        plan = whole_plan(ends_of(arch, layout, engine_tp, destinations, node=2))
        assert {move.dst for move in plan} == set(destinations)
        assert differing(carry_out(plan, arch, layout, engine_tp, checkpoint), arch, engine_tp, checkpoint) == []
        for rank in destinations:
            arriving = [move for move in plan if move.dst == rank]
            wanted = sum(piece.box.area for piece in engine_pieces(arch, engine_tp, rank % engine_tp))
            assert sum(move.numel for move in arriving) == wanted, "no element is sent twice"
            # The names of sources are unique per rank and box: what a rank holds itself never comes from a replica.
            remote = [(move.hf, source_box(move, sources[move.src])) for move in arriving if move.src != rank]
            assert not own.get(rank, set()) & set(remote)


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
    sizes: dict[str, Any] = {
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


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
    alike = expert(whole_plan(ends_of(arch, ParallelLayout(2, etp=2), 2)))
    assert alike and all(move.src == move.dst for move in alike)
    spread = expert(whole_plan(ends_of(arch, ParallelLayout(2, ep=2), 1)))
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
    plan = whole_plan(ends_of(arch, layout, 1))
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
    plan = whole_plan(ends_of(arch_like("llama", vocab_size=64), ParallelLayout(*ranks), engine_tp))
    remote = sum(move.numel for move in plan if move.src != move.dst)
    assert remote / sum(move.numel for move in plan) == remote_share


def test_a_pipeline_sends_what_the_other_stages_hold():
    arch, layout = arch_like("llama"), ParallelLayout(4, pp=4)
    plan = whole_plan(ends_of(arch, layout, 1))
    total = sum(piece.box.area for piece in engine_pieces(arch, 1, 0))
    for rank in range(4):
        held = sum(piece.box.area for piece in megatron_pieces(arch, layout, rank))
        assert sum(move.numel for move in plan if move.dst == rank and move.src != rank) == total - held


def test_senders_of_equal_pieces_share_the_load():
    boxes = [Piece(f"t{i}", Box(0, 1 + i % 5, 0, 8), f"t{i}", 0, 0) for i in range(200)]
    plan = whole_plan(listed_ends(dict.fromkeys(range(4), boxes), boxes, (4, 5, 6, 7)))
    sent = [sum(move.numel for move in plan if move.src == rank) for rank in range(4)]
    assert max(sent) - min(sent) <= max(piece.box.area for piece in boxes)
    alone = whole_plan(listed_ends(dict.fromkeys(range(4), boxes), boxes, (9,)))
    sent = [sum(move.numel for move in alone if move.src == rank) for rank in range(4)]
    assert max(sent) <= 1.1 * sum(sent) / 4


def test_a_sender_of_the_same_node_is_preferred():
    piece = Piece("t", Box(0, 8, 0, 8), "t", 0, 0)
    plan = whole_plan(listed_ends({0: [piece], 5: [piece]}, [piece], tuple(range(12)), node=4))
    assert [move.src for move in plan] == [0, 0, 0, 0, 5, 5, 5, 5, *[plan[8].src, plan[9].src] * 2]
    assert {plan[8].src, plan[9].src} == {0, 5}, "a node without a holder asks all in turn"


def test_the_proof_shows_ranks_that_planned_differently():
    """Layout, node size, engine: whatever one rank takes otherwise, a pair with it no longer agrees."""
    arch = ARCHS["qwen2_tied"]
    ends = ends_of(arch, ParallelLayout(8, tp=2), 1)
    (target,) = ends.targets
    odd = {
        "layout": ends_of(arch, ParallelLayout(8), 1),
        "nodes": dataclasses.replace(ends, ranks_per_node=4),
        "sources": dataclasses.replace(ends, sources=(1, 0, *range(2, 8))),
        "engine": dataclasses.replace(ends, targets=(target._replace(templates=tuple(t[::-1] for t in target.templates)),)),
    }
    agreed = plans_of(ends)
    for what, other in odd.items():
        wrong = {**agreed, 3: plan_rank(other, 3)}
        pairs = [(a, b) for a in wrong for b in wrong if a != b and wrong[a].sent.get(b, 0) != wrong[b].received.get(a, 0)]
        assert pairs and all(3 in pair for pair in pairs), what


def test_the_proof_depends_on_the_order_of_the_moves():
    tensors = [Piece(name, Box(0, 2, 0, 2), name, 0, 0) for name in "ab"]
    there = plan_rank(listed_ends({0: tensors}, tensors, (1,)), 0)
    here = plan_rank(listed_ends({0: tensors}, tensors[::-1], (1,)), 1)
    assert sorted(there.outgoing) == sorted(here.incoming) and there.sent[1] != here.received[0]


GEOMETRIES = {
    "qwen3-235b": (QWEN3_235B, ParallelLayout(256, tp=2, pp=8, ep=32, layers_per_stage=(12,) * 6 + (11,) * 2)),
    "deepseek-v3": (DEEPSEEK_V3, ParallelLayout(256, pp=16, ep=16, layers_per_stage=(4,) * 13 + (3,) * 3)),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_rank_of_a_large_world_plans_its_own_moves_only(name):
    """256 trainers, 8 replicas of 32: the moves of a rank stay those of its own boxes, and every stage sends in every phase."""
    arch, layout = GEOMETRIES[name]
    ends = large_ends(arch, layout, 32)
    plans = {rank: plan_rank(ends, rank) for rank in (37, 255)}
    wanted = sum(len(ends.targets[0].templates[kind]) for kind in ends.targets[0].sections)
    layers = Counter(section.first for section in ends.pieces.sections[1:])
    assert arch.moe is not None
    for rank, plan in plans.items():
        assert {move.dst for move in plan.incoming} == {rank} == {move.src for move in plan.outgoing}
        assert wanted <= len(plan.incoming) <= 1.1 * wanted
        experts = arch.moe.num_experts // layout.ep * layers[rank // layout.ranks_per_stage * layout.ranks_per_stage]
        assert sum(".experts." in move.hf for move in plan.outgoing) <= 3 * experts * 256
        for peer, other in plans.items():
            if peer != rank:
                assert [m for m in plan.outgoing if m.dst == peer] == [m for m in other.incoming if m.src == rank]
                assert plan.sent.get(peer, 0) == other.received.get(rank, 0)
    # In order of layers, one stage would send and the others wait.
    first = min(plans[255].outgoing, key=lambda move: move.step)
    assert first.step < 0.2 * plans[255].steps


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
        plan_rank(listed_ends(sources or {0: []}, [WHOLE], (0,)), 0)


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
    for m in whole_plan(listed_ends(sources, wanted, (0,))):
        got[m.target][m.d_row : m.d_row + m.rows, m.d_col : m.d_col + m.cols] = held[m.source][
            m.s_row : m.s_row + m.rows, m.s_col : m.s_col + m.cols
        ]
    for piece in wanted:
        assert torch.equal(got[piece.local], full[piece.box.r0 : piece.box.r1, piece.box.c0 : piece.box.c1])


class Threads:
    """`wire.Wire` between threads, as far as the rounds need it."""

    def __init__(self, world: int) -> None:
        self._barrier, self._values = threading.Barrier(world), [[] for _ in range(world)]

    def run(self, plans: dict[int, RankPlan], cap: int) -> list[list[Round]]:
        at: Any = lambda rank: SimpleNamespace(rank=rank, reduce=partial(self._reduce, rank))
        with ThreadPoolExecutor(len(plans)) as pool:
            return list(pool.map(lambda rank: agree_rounds(plans[rank], cap, at(rank)), plans))

    def _reduce(self, rank: int, values: list[int], op: Any) -> list[int]:
        self._values[rank] = values
        self._barrier.wait(60)
        reduced = [{dist.ReduceOp.MIN: min, dist.ReduceOp.MAX: max}[op](column) for column in zip(*self._values)]
        self._barrier.wait(60)
        return reduced


@pytest.mark.parametrize("cap", [1, 2000, 1 << 20])
def test_rounds_hold_every_move_once_within_the_cap(cap):
    arch, layout = ARCHS["llama"], ParallelLayout(4, tp=2, pp=2)
    plans = plans_of(ends_of(arch, layout, 2))
    rounds = Threads(4).run(plans, cap)
    assert len({len(of_rank) for of_rank in rounds}) == 1
    kept = [move for of_rank in rounds for one in of_rank for moves in (one.local, *one.incoming.values()) for move in moves]
    assert sorted(kept) == sorted(move for plan in plans.values() for move in plan.incoming)
    for number, together in enumerate(zip(*rounds)):
        assert len({one.on_wire for one in together}) == 1
        assert together[0].on_wire == any(one.outgoing for one in together)
        steps = {move.step for one in together for moves in (one.local, *one.incoming.values()) for move in moves}
        assert all(min(steps) > step for earlier in seen_steps(rounds, number) for step in earlier)
        for a, one in enumerate(together):
            size = lambda moves: 2 * sum(move.numel for of_peer in moves.values() for move in of_peer)
            assert max(size(one.outgoing), size(one.incoming)) <= cap or len(steps) == 1
            for b, other in enumerate(together):
                assert one.outgoing.get(b, []) == other.incoming.get(a, [])
    steps = plans[0].steps
    assert {1: len(rounds[0]) == steps, 2000: 1 < len(rounds[0]) < steps, 1 << 20: len(rounds[0]) == 1}[cap]


def seen_steps(rounds: list[list[Round]], number: int) -> list[set[int]]:
    """Steps of the rounds before `number`."""
    return [
        {move.step for of_rank in rounds for moves in (of_rank[i].local, *of_rank[i].incoming.values()) for move in moves}
        for i in range(number)
    ]


def test_a_destination_must_be_covered_by_pieces_and_constants():
    whole = engine_destination(ARCHS["llama"], 2, 1, torch.bfloat16)
    whole.check_complete()
    with pytest.raises(ValueError, match="engine parameter .*embed_tokens"):
        dataclasses.replace(whole, fills=()).check_complete()
    with pytest.raises(ValueError, match="engine parameter"):
        dataclasses.replace(whole, pieces=whole.pieces[:-1]).check_complete()
    with pytest.raises(ValueError, match="overlap"):
        dataclasses.replace(whole, pieces=(*whole.pieces, whole.pieces[-1])).check_complete()
