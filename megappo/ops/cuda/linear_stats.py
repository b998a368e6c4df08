"""WGMMA kernel of csrc/linear_stats for `linear_stats` and `linear_dlogits`, which works on the logits in registers.
It takes bf16 hidden states and weights with rows of whole 16 bytes on Hopper GPUs, unless the logits are restricted to ids. Every
other call runs in blocks, as on other GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.ops.dispatch import native_op
from megappo.ops.implementations import library_facts
from megappo.ops.linear_blocks import LinearLogits
from megappo.ops.linear_stats import dlogits_in_steps, stats_in_blocks
from megappo.ops.vocab_stats import Upstream


def usable() -> bool:
    """True if this build has the kernel and the process's GPU runs it."""
    archs = library_facts().get("cuda_archs", "")
    # Without a GPU torch raises for its capability.
    return "9.0a" in archs and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def takes(hidden: Tensor, weight: Tensor, kept: Tensor | None) -> bool:
    """True if the kernel computes this call."""
    hidden_size = hidden.shape[1]
    return (
        hidden.dtype == weight.dtype == torch.bfloat16
        and hidden_size > 0
        and hidden_size % 8 == 0  # tensor maps want rows of a multiple of 16 bytes
        and kept is None
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
    if takes(hidden, weight, kept):
        # No chunks: beside its results the kernel holds 16 bytes for each token and split of the vocabulary (at most 264 splits on
        # an H200, usually 33).
        kernel = native_op("linear_stats_wgmma")
        assert kernel is not None, "usable() asks for a build that has it"
        return kernel(
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
            keep_logits,
            invariant,
        )
    problem = LinearLogits(
        hidden, weight, target, vocab_start, num_valid, inv_temp, row_inv_temp, ignore_index, kept, bf16_logits, invariant
    )
    return stats_in_blocks(problem, want_entropy, keep_logits, chunk_tokens)


def linear_dlogits(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    entropy: Tensor,
    g_logprob: Tensor,
    g_entropy: Tensor | None,
    vocab_start: int,
    inv_temp: float,
    row_inv_temp: Tensor | None,
    ignore_index: int,
    kept: Tensor | None,
    bf16_logits: bool,
    invariant: bool,
) -> Tensor:
    """Compute the op of this name (`ops/linear_stats.py`), in the kernel or in two steps."""
    upstream = Upstream(lse, entropy, g_logprob, g_entropy)
    if takes(hidden, weight, kept):
        kernel = native_op("linear_dlogits_wgmma")
        assert kernel is not None, "usable() asks for a build that has it"
        # A token's bits never depend on the others.
        return kernel(hidden, weight, target, *upstream, vocab_start, inv_temp, row_inv_temp, ignore_index, bf16_logits)
    rest = vocab_start, weight.shape[0], inv_temp, row_inv_temp, ignore_index, kept, bf16_logits, invariant
    return dlogits_in_steps(LinearLogits(hidden, weight, target, *rest), upstream)
