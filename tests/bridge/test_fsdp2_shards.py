"""The plan from DTensor shards: it fills every engine parameter from the shards alone, and no element travels twice."""

from __future__ import annotations

from math import prod

import pytest
import torch

from megappo.bridge.destination import Move
from megappo.bridge.plan import Ends
from megappo.bridge.target import Target
from megappo.models.arch import ModelArch
from megappo.models.pieces import as_2d
from megappo.models.row_shards import shard_piece_map
from megappo.models.weight_map import hf_tensors
from megappo.parallel.layout import ParallelLayout
from tests.bridge.engines import arch_like, engine_destination, engine_pieces, engine_tensors, random_checkpoint
from tests.bridge.test_plan import differing, whole_plan

ARCHS = {
    "llama": arch_like("llama"),
    "qwen2_tied": arch_like("qwen2", tied_embeddings=True),
    "qwen3, odd vocabulary": arch_like("qwen3", num_kv_heads=4, vocab_size=51),
}
# Of the policy; tp of the engine.
LAYOUTS = [
    (ParallelLayout(3), 1),
    (ParallelLayout(2, tp=2), 1),
    (ParallelLayout(2, tp=2), 2),
    (ParallelLayout(4, tp=2), 1),
    (ParallelLayout(4, tp=2), 4),
    (ParallelLayout(6, tp=2), 2),
    (ParallelLayout(8, tp=2, cp=2), 2),
    (ParallelLayout(4, cp=2), 2),
]


@pytest.mark.parametrize("name", ARCHS)
def test_shards_fill_the_engine_exactly(name: str) -> None:
    for layout, engine_tp in LAYOUTS:
        arch, pieces = ARCHS[name], shard_piece_map(ARCHS[name], layout)
        checkpoint = random_checkpoint(arch, 0)
        described = [engine_destination(arch, engine_tp, tp_rank, torch.bfloat16) for tp_rank in range(engine_tp)]
        destinations = tuple(range(layout.world_size // engine_tp * engine_tp))
        targets = tuple(Target.decode(Target.of(one, pieces).encode()) for one in described)
        plan = whole_plan(Ends(pieces, tuple(range(layout.world_size)), destinations, targets))
        shards = {
            rank: {
                piece.local: as_2d(checkpoint[piece.hf])[piece.box.r0 : piece.box.r1, piece.box.c0 : piece.box.c1] for piece in held
            }
            for rank, held in pieces.items()
        }
        got = carried(plan, arch, engine_tp, destinations, checkpoint, shards)
        assert differing(got, arch, engine_tp, checkpoint) == []
        for rank in destinations:
            arriving = [move for move in plan if move.dst == rank]
            wanted = sum(piece.box.area for piece in engine_pieces(arch, engine_tp, rank % engine_tp))
            assert sum(move.numel for move in arriving) == wanted, "each element arrives once"
            # A rank gives itself what it holds; nothing of that comes over the wire, and no tensor is gathered in between.
            held = {piece.hf: piece.box for piece in pieces[rank]}
            given = sum(
                overlap.area for piece in engine_pieces(arch, engine_tp, rank % engine_tp) if (overlap := held_part(held, piece))
            )
            assert sum(move.numel for move in arriving if move.src == rank) == given
        whole = sum(map(prod, hf_tensors(arch).values()))
        largest = max(sum(tensor.numel() for tensor in of_rank.values()) for of_rank in shards.values())
        assert largest < whole / layout.world_size * 1.5, "a rank holds little more than its share"


def held_part(held: dict, piece):
    return piece.box.intersect(held[piece.hf]) if piece.hf in held else None


def carried(
    plan: list[Move], arch: ModelArch, engine_tp: int, destinations: tuple[int, ...], checkpoint: dict, shards: dict
) -> dict:
    """Parameters of every engine rank after the moves."""
    got = {
        rank: {
            name: torch.zeros_like(tensor) for name, tensor in engine_tensors(arch, checkpoint, engine_tp, rank % engine_tp).items()
        }
        for rank in destinations
    }
    for m in plan:
        source, target = shards[m.src][m.source], as_2d(got[m.dst][m.target])
        target[m.d_row : m.d_row + m.rows, m.d_col : m.d_col + m.cols] = source[
            m.s_row : m.s_row + m.rows, m.s_col : m.s_col + m.cols
        ]
    return got
