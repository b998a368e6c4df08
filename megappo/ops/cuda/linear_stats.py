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


def takes(problem: LinearLogits) -> bool:
    """True if the kernel computes this call."""
    hidden_size = problem.hidden.shape[1]
    return (
        problem.hidden.dtype == problem.weight.dtype == torch.bfloat16
        and hidden_size > 0
        and hidden_size % 8 == 0  # tensor maps want rows of a multiple of 16 bytes
        and problem.kept is None
    )


def linear_stats(problem: LinearLogits, want_entropy: bool, keep_logits: bool, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Compute the op of this name (`ops/linear_stats.py`), in the kernel or in blocks."""
    if not takes(problem):
        return stats_in_blocks(problem, want_entropy, keep_logits, chunk_tokens)
    # No chunks: beside its results the kernel holds 16 bytes for each token and split of the vocabulary (at most 264 splits on
    # an H200, usually 33).
    kernel = native_op("linear_stats_wgmma")
    assert kernel is not None, "usable() asks for a build that has it"
    *given, _, bf16_logits, invariant = problem
    return kernel(*given, want_entropy, bf16_logits, keep_logits, invariant)


def linear_dlogits(problem: LinearLogits, upstream: Upstream) -> Tensor:
    """Compute the op of this name (`ops/linear_stats.py`), in the kernel or in two steps."""
    if not takes(problem):
        return dlogits_in_steps(problem, upstream)
    kernel = native_op("linear_dlogits_wgmma")
    assert kernel is not None, "usable() asks for a build that has it"
    # A token's bits never depend on the others. The kernel's weight is all vocabulary.
    hidden, weight, target, vocab_start, _, *scale, _, bf16_logits, _ = problem
    return kernel(hidden, weight, target, *upstream, vocab_start, *scale, bf16_logits)
