"""Whitening of advantages with the moments of the whole global batch, and the mean of several critics.
The moments add over ranks and batches; with a rank's or a micro-batch's own moments the update would depend on the layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def aggregate(values: Sequence[Tensor], how: Literal["mean", "min"]) -> Tensor:
    """Elementwise mean or minimum of the critics' values, in their shape and dtype; of one critic its values, bit for bit."""
    if len(values) == 1:
        return values[0]
    stacked = torch.stack(list(values))
    # The fp64 sum of fp32 values is exact, so the order of the critics changes nothing.
    return stacked.amin(0) if how == "min" else stacked.double().mean(0).to(stacked.dtype)


def disagreement(values: Sequence[Tensor]) -> Tensor:
    """Population standard deviation of the critics' values at every element, fp32, >= 0."""
    return torch.stack(list(values)).double().std(0, correction=0).float()


# Added to the variance, so that constant advantages become 0 and not noise divided by noise.
EPSILON = 1e-8


def whitening_moments(advantage: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares over mask [T] bool, [3] fp64; advantage: [T], 0 where the mask is false."""
    exact = advantage.double()
    return torch.stack((mask.sum().double(), exact.sum(), exact.square().sum()))


def whiten_apply(advantage: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """Whiten: (advantage - mean) / sqrt(var + EPSILON) on the mask, exactly 0 elsewhere; [T] fp32.
    advantage: [T], floating. mask: [T] bool. moments: [3] fp64, `whitening_moments` summed over all ranks and batches. The
    variance is unbiased (count - 1). With 0 or 1 valid tokens the result is 0 everywhere."""
    count, total, squares = moments.unbind()
    mean = total / count.clamp(min=1.0)
    # For constant advantages, rounding can leave the difference of the two large numbers just below 0.
    variance = ((squares - total * mean) / (count - 1.0).clamp(min=1.0)).clamp(min=0.0)
    white = (advantage.double() - mean) * torch.rsqrt(variance + EPSILON)
    return torch.where(mask & (count > 1.0), white, 0.0).float()
