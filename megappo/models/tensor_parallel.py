"""Tensor parallel of transformers' own classes: DTensor styles for the modules of a family, by the cuts of its rules.

Under sequence parallel the tokens between the projections are cut too. A block gathers them once in front of itself, not in front
of each projection: transformers' classes read the shape of their input, and gradients are summed before they travel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from megappo.models.arch import ModelArch
from megappo.models.hf_classes import decoder_of
from megappo.models.vision_families import TOWER
from megappo.models.weight_map import hf_cuts, layer_rules


def cut_over_tp(model: torch.nn.Module, arch: ModelArch, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Make DTensors of the tensors that tp cuts, and put collectives around them; other parameters stay as they are.
    mesh: the tp axis. Call it before FSDP2 takes the model; weights may be on the meta device."""
    decoder = decoder_of(model)
    tokens = Shard(1) if sequence_parallel else Replicate()  # of [1, T, H]
    for layer in decoder.layers:
        parallelize_module(layer, mesh, _layer_styles(arch, tokens))
    # transformers makes masks and positions from the shape of the embedding's output, so the tokens are cut behind it.
    parallelize_module(decoder.embed_tokens, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()))
    if sequence_parallel:
        start = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(tokens,), use_local_output=True)
        parallelize_module(decoder.layers[0], mesh, start)
    if isinstance(model, PreTrainedModel):
        projection: Any = model.get_output_embeddings()
        parallelize_module(projection, mesh, ColwiseParallel(input_layouts=tokens))
        if arch.tied_embeddings:  # parallelize_module untied them
            projection.weight = decoder.embed_tokens.weight


def _layer_styles(arch: ModelArch, tokens: Shard | Replicate) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {}
    for rule in layer_rules(arch, 0):  # dense layers are alike
        for name in rule.hf(arch):
            path = name.rpartition(".")[0]
            if rule.cut.dim == 0:
                styles[path] = ColwiseParallel()
            elif rule.cut.dim == 1:
                styles[path] = RowwiseParallel(output_layouts=tokens)
    whole = Replicate()
    styles["mlp"] = PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(whole,), use_local_output=False)
    styles["self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": tokens},
        desired_input_kwarg_layouts={"hidden_states": whole},
        use_local_output=False,
    )
    return styles


def copied_names(arch: ModelArch, value_head: bool) -> set[str]:
    """Tensors of which every tp rank has a copy."""
    return {name for name, cut in hf_cuts(arch, value_head).items() if cut.dim is None}


def partial_names(arch: ModelArch, value_head: bool, *, sequence_parallel: bool) -> set[str]:
    """Copies whose gradient on a tp rank is of its own heads (or, under sequence parallel, tokens) and has to be summed over tp.
    That of a tower is whole: gradients of features are gathered before."""
    cuts = {name: cut for name, cut in hf_cuts(arch, value_head).items() if not name.startswith(TOWER)}
    return {name for name, cut in cuts.items() if cut.by_heads or (sequence_parallel and cut.dim is None)}
