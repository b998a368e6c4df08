"""Values of several critics: their aggregate and their disagreement (AsyPPO, arXiv:2510.01656)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def aggregate(values: Sequence[Tensor], how: Literal["mean", "min"]) -> Tensor:
    """Elementwise mean or least of the critics' values, in their shape and dtype; of one critic its own, to the bit."""
    if len(values) == 1:
        return values[0]
    stacked = torch.stack(list(values))
    # In fp64: the sum of fp32 values is exact there, so that the order of the critics changes nothing.
    return stacked.amin(0) if how == "min" else stacked.double().mean(0).to(stacked.dtype)


def disagreement(values: Sequence[Tensor]) -> Tensor:
    """Population standard deviation of the critics' values at every element, fp32, >= 0."""
    return torch.stack(list(values)).double().std(0, correction=0).float()
