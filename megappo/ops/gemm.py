"""Matrix products with fp32 sums for operands of any type (fp64 for fp64).
A GPU multiplies bf16 and can return its fp32 accumulators; the CPU rounds a bf16 product to bf16, so operands are widened first."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.ops.vocab_stats import compute_dtype


def operand(x: Tensor) -> Tensor:
    """Convert `x` for `mm_wide`: to the compute type on the CPU, unchanged on a GPU."""
    # CPU: logits rounded to bf16 cost up to 0.16 of a log-prob; widened products run at half the speed.
    return x if x.is_cuda else x.to(compute_dtype(x.dtype))


def mm_wide(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two `operand`s: a @ b in the compute type."""
    if a.dtype == compute_dtype(a.dtype):
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32)


def add_mm_(total: Tensor, a: Tensor, b: Tensor, *, first: bool, exact: bool = True) -> None:
    """Compute total += a @ b, or total = a @ b for the first term. total: in the type of `a` and `b`, or fp32.
    exact false lets the CPU round the term of a half-type product to that type, which doubles its speed."""
    if a.dtype == total.dtype:
        torch.mm(a, b, out=total) if first else total.addmm_(a, b)
    elif a.is_cuda:  # bf16 operands, fp32 accumulators added to `total` without rounding
        if first:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif exact:  # half types on the CPU: widened, so that the term is not rounded
        add_mm_(total, a.to(total.dtype), b.to(total.dtype), first=first)
    elif first:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)
