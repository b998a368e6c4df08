"""Copies of KV heads, where a model has fewer than there are tensor-parallel ranks: each rank holds the one that its query heads
share, as in vLLM.

A rank's gradient of its copy is of its own query heads. Once it is the sum over the copies, all take the same step, and the
gradient norm counts one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.models.arch import ModelArch

_FIRST_ROW, _COUNTS = "first_copied_row", "counts_copies"


def mark_copy(parameter: torch.nn.Parameter, first_row: int, *, counts: bool) -> None:
    """Mark the rows from `first_row` on as copies. counts: this rank's are those of the gradient norm."""
    setattr(parameter, _FIRST_ROW, first_row)
    setattr(parameter, _COUNTS, counts)


def mark_kv_copies(model: torch.nn.Module, arch: ModelArch, tp: int, tp_rank: int) -> None:
    """Mark what a model that was built for a tp rank holds copies of."""
    if (copies := arch.kv_copies(tp)) == 1:
        return
    for name, parameter in model.named_parameters():
        if "self_attention.linear_qkv." in name:  # weight and bias: this rank's query heads, then its key and value head
            mark_copy(parameter, arch.num_heads // tp * arch.query_rows, counts=tp_rank % copies == 0)


def sum_copies(parameters: Iterable[torch.nn.Parameter], copies: int, tp: dist.ProcessGroup) -> None:
    """Add up the gradients of copies, which Megatron's reductions leave to each rank. copies: of a KV head. Collective over tp."""
    place = tp.rank() // copies
    for parameter in parameters:
        first = getattr(parameter, _FIRST_ROW, None)
        if first is None or not parameter.requires_grad:
            continue
        mine = cast(Any, parameter).main_grad[first:]  # of DDP
        # All KV heads at once: once an update, a group of ranks for each would cost more than it saves.
        every = mine.new_zeros(tp.size() // copies, *mine.shape)
        every[place] = mine
        dist.all_reduce(every, group=tp)
        mine.copy_(every[place])


def sum_together(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Add up gradients of copies over a group in place, in one exchange. Collective."""
    if gradients:
        merged = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(merged, group=group)
        for gradient, total in zip(gradients, merged.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(total.view_as(gradient))


def counted_elements(parameter: torch.nn.Parameter) -> int | None:
    """Number of the first elements whose gradient this rank adds to the norm; None for all."""
    if getattr(parameter, _COUNTS, True):
        return None
    return getattr(parameter, _FIRST_ROW) * (parameter.numel() // parameter.shape[0])
