"""Whitening of advantages with the moments of the whole global batch.

The moments come from `token_advantages` and are summed over data-parallel ranks by the caller; whitening a rank or a micro-batch
with its own moments would make the update depend on the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.ops.dispatch import op

# added to the variance, so that constant advantages become 0 and not noise divided by noise
EPSILON = 1e-8


def whiten_apply(advantage: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """(advantage - mean) / sqrt(var + 1e-8) on the mask, exactly 0 elsewhere; [T] fp32.

    advantage: [T], floating. mask: [T] bool. moments: [3] fp64 global count, sum, sum of squares. The variance is the unbiased
    one (count - 1). With 0 or 1 valid tokens the result is 0 everywhere. Raises ValueError for other shapes, types or devices.
    """
    if advantage.dim() != 1 or not advantage.dtype.is_floating_point:
        raise ValueError(f"advantage is {tuple(advantage.shape)} {advantage.dtype}: one floating value for each token is wanted")
    for name, x, size, dtype in (("mask", mask, advantage.numel(), torch.bool), ("moments", moments, 3, torch.float64)):
        if x.shape != (size,) or x.dtype != dtype:
            raise ValueError(f"{name} is {tuple(x.shape)} {x.dtype}: ({size},) {dtype} is wanted")
        if x.device != advantage.device:
            raise ValueError(f"{name} is on {x.device} and advantage on {advantage.device}: one device is wanted")
    return torch.ops.megappo.whiten_apply(advantage, mask, moments)


@op
def _whiten_apply(advantage: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    count, total, squares = moments.unbind()
    mean = total / count.clamp(min=1.0)
    # the difference of two large numbers can come out just below 0 for constant advantages
    variance = ((squares - total * mean) / (count - 1.0).clamp(min=1.0)).clamp(min=0.0)
    white = (advantage.double() - mean) * torch.rsqrt(variance + EPSILON)
    return torch.where(mask & (count > 1.0), white, 0.0).float()


@_whiten_apply.register_fake
def _(advantage, mask, moments):
    return advantage.new_empty(advantage.shape, dtype=torch.float32)
