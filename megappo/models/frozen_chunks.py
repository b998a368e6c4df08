"""Frozen parameters of a Megatron model's chunks, before DDP and optimizer see them: no gradient buffer, no optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megappo.models.gpt import PackedModel
from megappo.models.naming import named_parameters


def freeze_chunks(chunks: Sequence[PackedModel], is_frozen: Callable[[str], bool]) -> None:
    """Freeze the parameters whose canonical name `is_frozen` says."""
    for name, parameter in named_parameters(chunks).items():
        if is_frozen(name):
            parameter.requires_grad_(False)
    for chunk in chunks:
        recomputes = chunk.config.recompute_granularity == "full"
        if chunk.pre_process and recomputes and not any(p.requires_grad for p in chunk.embedding.parameters()):
            # A recomputed layer whose input needs no gradient gives none to its weights either.
            chunk.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_(torch.is_grad_enabled()))
