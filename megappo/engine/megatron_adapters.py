"""Adapters and value head of a model chunk as a checkpoint holds them: the base model is not part of it.

Names, shapes and cuts are those of Hugging Face modules, so a checkpoint is read in any layout.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megappo.models.gpt import CriticModel, PackedModel
from megappo.models.lora import ADAPTER_A, ADAPTER_B
from megappo.models.lora_linear import adapters_of
from megappo.models.weight_map import VALUE_HEAD
from megappo.parallel.groups import ProcessGroups


def sharded_adapters(chunk: PackedModel, groups: ProcessGroups) -> dict[str, ShardedTensor]:
    """Description of every adapter of the chunk, and of its value head, by key."""
    found: dict[str, ShardedTensor] = {}
    for adapters in adapters_of([chunk]):
        for one in adapters.each():
            rank, (rows, columns), box = len(one.lora_A), one.size, one.box
            a, b = one.module + ADAPTER_A, one.module + ADAPTER_B
            found[a] = _sharded(a, one.lora_A, (rank, columns), (0, box.c0), groups)
            found[b] = _sharded(b, one.lora_B, (rows, rank), (box.r0, 0), groups)
    if isinstance(chunk, CriticModel) and chunk.post_process:
        head = chunk.value_head.weight
        found[VALUE_HEAD] = _sharded(VALUE_HEAD, head, tuple(head.shape), (0, 0), groups)
    return found


def _sharded(key: str, parameter: Tensor, shape: tuple[int, ...], offset: tuple[int, ...], groups: ProcessGroups) -> ShardedTensor:
    # Copies of a whole tensor on tp ranks are told apart from parts of a tensor that is cut over them.
    copy = groups.coordinates.tp if tuple(parameter.shape) == shape else 0
    replica = (0, copy, groups.collection.dp_cp.rank())
    local = tuple(parameter.shape)
    return ShardedTensor(key, parameter, parameter.dtype, local, shape, offset, axis_fragmentations=None, replica_id=replica)


@torch.no_grad()
def load_adapters(chunk: PackedModel, values: Mapping[str, Tensor]) -> None:
    """Copy what the checkpoint's reader made of `sharded_adapters` into the chunk."""
    for adapters in adapters_of([chunk]):
        for one in adapters.each():
            one.lora_A.copy_(values[one.module + ADAPTER_A])
            one.lora_B.copy_(values[one.module + ADAPTER_B])
    if VALUE_HEAD in values:
        assert isinstance(chunk, CriticModel)
        chunk.value_head.weight.copy_(values[VALUE_HEAD])
