"""Triton twin of `ops/whiten.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megappo.algo.whitening import EPSILON

BLOCK = 1024


@triton.jit
def _whiten(advantage, mask, moments, out, num_tokens, epsilon, BLOCK: tl.constexpr):
    count, total, squares = tl.load(moments), tl.load(moments + 1), tl.load(moments + 2)
    mean = total / tl.maximum(count, 1.0)
    # For constant advantages, rounding can leave the difference of the two large numbers just below 0.
    variance = tl.maximum((squares - total * mean) / tl.maximum(count - 1.0, 1.0), 0.0)
    scale = 1.0 / tl.sqrt(variance + epsilon)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens
    kept = tl.load(mask + at, mask=inside, other=0).to(tl.int1)
    white = (tl.load(advantage + at, mask=inside, other=0.0).to(tl.float64) - mean) * scale
    tl.store(out + at, tl.where(kept, tl.where(count > 1.0, white, 0.0), 0.0).to(tl.float32), mask=inside)


def whiten_apply(advantage: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """See `megappo.ops.whiten.whiten_apply`."""
    num_tokens = advantage.numel()
    out = torch.empty(num_tokens, dtype=torch.float32, device=advantage.device)
    if num_tokens:
        grid = (triton.cdiv(num_tokens, BLOCK),)
        _whiten[grid](advantage.contiguous(), mask.contiguous(), moments.contiguous(), out, num_tokens, EPSILON, BLOCK=BLOCK)
    return out
