"""WGMMA kernel of csrc/linear_stats for `linear_stats`, which keeps the logits in registers.
It takes bf16 hidden states and weights with rows of whole 16 bytes on Hopper GPUs, unless the logits are kept or restricted to
ids. Every other call runs in blocks, as on other GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.ops.dispatch import native_op
from megappo.ops.implementations import library_facts
from megappo.ops.linear_blocks import LinearLogits, logits_dtype_of
from megappo.ops.linear_stats import stats_in_blocks


def usable() -> bool:
    """True if this build has the kernel and the process's GPU runs it."""
    archs = library_facts().get("cuda_archs", "")
    # Without a GPU torch raises for its capability.
    return "9.0a" in archs and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def takes(hidden: Tensor, weight: Tensor, kept: Tensor | None, keep_logits: bool) -> bool:
    """True if the kernel computes this call."""
    hidden_size = hidden.shape[1]
    return (
        hidden.dtype == weight.dtype == torch.bfloat16
        and hidden_size > 0
        and hidden_size % 8 == 0  # tensor maps want rows of a multiple of 16 bytes
        and kept is None
        and not keep_logits
    )


def linear_stats(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start: int,
    num_valid: int,
    inv_temp: float,
    row_inv_temp: Tensor | None,
    ignore_index: int,
    want_entropy: bool,
    kept: Tensor | None,
    bf16_logits: bool,
    keep_logits: bool,
    chunk_tokens: int,
    invariant: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the op of this name (`ops/linear_stats.py`), in the kernel or in blocks."""
    if takes(hidden, weight, kept, keep_logits):
        # No chunks: beside its result the kernel holds 16 bytes for each token and split of the vocabulary (at most 264 splits on
        # an H200, usually 33).
        kernel = native_op("linear_stats_wgmma")
        assert kernel is not None, "usable() asks for a build that has it"
        stats = kernel(
            hidden,
            weight,
            target,
            vocab_start,
            num_valid,
            inv_temp,
            row_inv_temp,
            ignore_index,
            want_entropy,
            bf16_logits,
            invariant,
        )
        return stats, hidden.new_empty((0, 0), dtype=logits_dtype_of(weight, bf16_logits))
    problem = LinearLogits(
        hidden, weight, target, vocab_start, num_valid, inv_temp, row_inv_temp, ignore_index, kept, bf16_logits, invariant
    )
    return stats_in_blocks(problem, want_entropy, keep_logits, chunk_tokens)
