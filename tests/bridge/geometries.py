"""The largest open models as geometries, for plans of worlds that do not exist here.

DeepSeek-V3's attention (MLA) and shared expert are no part of megappo: grouped-query attention of 8 KV heads, a third larger,
stands in for both. Layers, experts and all widths are the model's, and the experts are 97 % of its bytes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megappo.bridge.plan import Ends
from megappo.bridge.target import Target
from megappo.models.arch import ModelArch, MoeArch
from megappo.models.pieces import PieceMap
from megappo.models.weight_map import piece_map
from megappo.parallel.layout import ParallelLayout
from tests.bridge.engines import arch_like, engine_destination

QWEN3_235B = arch_like(
    "qwen3_moe",
    num_layers=94,
    hidden_size=4096,
    num_heads=64,
    num_kv_heads=4,
    head_dim=128,
    ffn_size=12288,
    vocab_size=151936,
    moe=MoeArch(128, 8, 1536, True),
)
DEEPSEEK_V3 = arch_like(
    "qwen3_moe",
    num_layers=61,
    hidden_size=7168,
    num_heads=128,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=18432,
    vocab_size=129280,
    moe=MoeArch(256, 8, 2048, True, dense_layers=(0, 1, 2)),
)


def large_ends(arch: ModelArch, layout: ParallelLayout, engine_tp: int, apart: bool = False, ranks_per_node: int = 8) -> Ends:
    """As many engine ranks as trainers, on the same ranks or, `apart`, on the next ones."""
    pieces, world = piece_map(arch, layout), layout.world_size
    targets = tuple(large_target(arch, layout, pieces, engine_tp, tp_rank) for tp_rank in range(engine_tp))
    first = world if apart else 0
    return Ends(pieces, tuple(range(world)), tuple(range(first, first + world)), targets, ranks_per_node)


def large_target(arch: ModelArch, layout: ParallelLayout, pieces: PieceMap, engine_tp: int, tp_rank: int) -> Target:
    """An engine rank, described by as many layers as show every kind."""
    layers = 1 + next(layer for layer in range(arch.num_layers) if arch.kind(layer).sparse)
    few = replace(arch, num_layers=layers)
    stage = replace(layout, world_size=layout.ranks_per_stage, pp=1, vpp=1, layers_per_stage=())
    target = Target.of(engine_destination(few, engine_tp, tp_rank, torch.bfloat16), piece_map(few, stage))
    kinds = {few.kind(layer).sparse: target.sections[1 + layer] for layer in range(layers)}
    return target._replace(sections=(0, *(kinds[arch.kind(layer).sparse] for layer in range(arch.num_layers))))
