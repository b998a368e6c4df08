"""Whitening of advantages as an op; `algo/whitening.py` has the formula."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algo import whitening as reference
from megappo.ops.dispatch import op


def whiten_apply(advantage: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """(advantage - mean) / sqrt(var + 1e-8) on the mask, exactly 0 elsewhere; [T] fp32.

    advantage: [T], floating. mask: [T] bool. moments: [3] fp64 global count, sum, sum of squares: those of `token_advantages`,
    summed over ranks by the caller. The variance is unbiased (count - 1). With 0 or 1 valid tokens the result is 0 everywhere.
    Raises ValueError for other shapes, types or devices.
    """
    if advantage.dim() != 1 or not advantage.dtype.is_floating_point:
        raise ValueError(f"advantage is {tuple(advantage.shape)} {advantage.dtype}: one floating value for each token is wanted")
    for name, x, size, dtype in (("mask", mask, advantage.numel(), torch.bool), ("moments", moments, 3, torch.float64)):
        if x.shape != (size,) or x.dtype != dtype:
            raise ValueError(f"{name} is {tuple(x.shape)} {x.dtype}: ({size},) {dtype} is wanted")
        if x.device != advantage.device:
            raise ValueError(f"{name} is on {x.device} and advantage on {advantage.device}: one device is wanted")
    return torch.ops.megappo.whiten_apply(advantage, mask, moments)


_whiten_apply = op(reference.whiten_apply, file=__name__)


@_whiten_apply.register_fake
def _(advantage, mask, moments):
    return advantage.new_empty(advantage.shape, dtype=torch.float32)
