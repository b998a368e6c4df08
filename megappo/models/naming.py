"""Canonical names of a role's parameters: a tensor has the same name in every layout and implementation.

Layers and experts have the numbers of the whole model; adapters (`lora_linear.py`) the Hugging Face names of their modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megappo.models.gpt import PackedModel

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_SEQUENTIAL_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.*)$")
_GROUPED_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc[12]\.weight)(\d+)$")  # TransformerEngine's grouped GEMM


def named_parameters(chunks: Sequence[PackedModel]) -> dict[str, torch.nn.Parameter]:
    """Canonical name -> parameter of this rank, over its model chunks (not wrapped)."""
    named = {name: parameter for chunk in chunks for name, parameter in _canonical(chunk)}
    assert len(named) == sum(1 for chunk in chunks for _ in chunk.parameters()), "two chunks hold the same layer"
    return named


def _canonical(chunk: PackedModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, parameter in chunk.named_parameters():
        match = _LAYER.match(name)
        if match is None:
            yield name, parameter
            continue
        layers: Any = chunk.decoder.layers
        layer = layers[int(match[1])]
        inside = match[2]
        if ".lora." in inside:
            adapter: Any = layer.get_submodule(inside.rpartition(".")[0])
            yield f"{adapter.module}.{inside.rpartition('.')[2]}.weight", parameter  # as PEFT names it
            continue
        if inside.startswith("mlp.experts."):
            inside = expert_name(inside, layer.mlp.local_expert_indices[0])
        yield f"decoder.layers.{layer.layer_number - 1}.{inside}", parameter  # Megatron counts layers from 1


def expert_name(inside: str, first: int) -> str:
    """Canonical name of an expert's tensor, from its name inside its layer in either implementation.
    first: number of this rank's first expert. ValueError for any other name."""
    if match := _SEQUENTIAL_EXPERT.match(inside):
        local, tensor = int(match[1]), match[2]
    elif match := _GROUPED_EXPERT.match(inside):
        local, tensor = int(match[2]), match[1]
    else:
        raise ValueError(f"{inside} is not a tensor of an expert")
    return f"mlp.experts.local_experts.{first + local}.{tensor}"
