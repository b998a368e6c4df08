"""Value losses beside the clipped squared error of `losses.py`: Huber's, and cross-entropy with returns spread over bins.
Differentiable by autograd. `weight` [T] is as in `losses.py`: a token with weight 0 is ignored, even if NaN. Losses are sums;
half precision is computed in fp32, fp64 in fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megappo.algo.losses import check_per_token

SMOOTHING = 0.75
"""Standard deviation of `hl_gauss` in widths of a bin (Farebrother et al. 2024, arXiv:2403.03950, 3.2)."""


def huber_loss(
    value: Tensor, old_value: Tensor, returns: Tensor, weight: Tensor, clip: float | None, delta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute (sum of weight * l, metrics), l = max(h(v - R), h(v_clipped - R)), v_clipped within `clip` of old_value.
    h(e) = e^2 / 2 up to |e| = delta, then delta (|e| - delta / 2) (Huber 1964). All tensors [T]; differentiable by `value`. clip
    None is h(v - R). Metrics: VALUE_SUMS, VALUE_MAXIMA. Raises ValueError for tensors of different shapes or devices."""
    check_per_token(value=value, old_value=old_value, returns=returns, weight=weight)
    valid = weight != 0
    new, old, target = _kept(valid, value, old_value, returns)
    error = new - target
    loss, cut = _huber(error, delta), torch.zeros_like(valid)
    if clip is not None:
        moved = new - old
        clipped = _huber(old + moved.clamp(-clip, clip) - target, delta)
        # As `losses.value_loss`: tokens inside the clip are equal up to rounding and keep their gradient.
        cut = (clipped > loss) & (moved.abs() > clip)
        # A NaN in the old value would lose every comparison and disappear.
        loss = torch.where(moved.isnan(), moved, torch.where(cut, clipped, loss))
    return _weighted(loss, weight), {"value_clip_sum": _count(cut), **_error_metrics(new.detach(), target, valid)}


def _huber(error: Tensor, delta: float) -> Tensor:
    size = error.abs()
    return torch.where(size <= delta, 0.5 * error.square(), delta * (size - 0.5 * delta))


@dataclass(frozen=True)
class ValueBins:
    """Bins of a categorical value head: the value is the mean of their centres under the head's distribution.

    two_hot: `num` centres from `low` to `high`; a return is shared by its two neighbours so that their mean is the return (MuZero,
    arXiv:1911.08265, appendix F; DreamerV3, arXiv:2301.04104, without its symlog). hl_gauss: `num` intervals that divide [low,
    high]; a return is a normal distribution around it, cut off at both ends (arXiv:2403.03950, 3.2).
    """

    kind: Literal["hl_gauss", "two_hot"]
    num: int
    low: float
    high: float

    @property
    def width(self) -> float:
        return (self.high - self.low) / (self.num - 1 if self.kind == "two_hot" else self.num)

    def centres(self, like: Tensor) -> Tensor:
        """Centres of the bins, [num], on the device and in the dtype of `like`."""
        inset = 0.0 if self.kind == "two_hot" else self.width / 2
        return torch.linspace(self.low + inset, self.high - inset, self.num, dtype=like.dtype, device=like.device)

    def project(self, returns: Tensor) -> Tensor:
        """Spread returns [...] over the bins: [..., num] probabilities. A return out of [low, high] counts as the nearer end."""
        inside = returns.clamp(self.low, self.high)[..., None]
        if self.kind == "two_hot":
            # A hat around every centre: no index, which NaN would not have.
            return (1.0 - (inside - self.centres(returns)).abs() / self.width).clamp(min=0.0)
        edges = torch.linspace(self.low, self.high, self.num + 1, dtype=returns.dtype, device=returns.device)
        below = torch.erf((edges - inside) / (math.sqrt(2.0) * SMOOTHING * self.width))
        return below.diff(dim=-1) / (below[..., -1:] - below[..., :1])

    def expectation(self, logits: Tensor) -> Tensor:
        """Values [...] of logits [..., num]."""
        return logits.softmax(dim=-1) @ self.centres(logits)


def categorical_loss(logits: Tensor, returns: Tensor, weight: Tensor, bins: ValueBins) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute (sum of weight * cross-entropy of the projected return and the head's distribution, metrics).

    logits: [T, bins.num], aligned with their tokens; differentiable. returns, weight: [T]. Metrics: VALUE_SUMS without the clip's,
    VALUE_MAXIMA, and return_outside_sum, tokens whose return lies outside of the bins. Raises ValueError for shapes that do not
    fit.
    """
    check_per_token(returns=returns, weight=weight)
    if tuple(logits.shape) != (len(returns), bins.num):
        raise ValueError(f"logits {tuple(logits.shape)} are wanted as [{len(returns)}, {bins.num}], one row per token")
    valid = weight != 0
    (rows,) = _kept(valid[:, None], logits)
    (target,) = _kept(valid, returns)
    loss = -(bins.project(target.to(rows.dtype)) * rows.log_softmax(dim=-1)).sum(dim=-1)
    outside = valid & ((target < bins.low) | (target > bins.high))
    metrics = _error_metrics(bins.expectation(rows.detach()), target, valid)
    return _weighted(loss, weight), {"return_outside_sum": _count(outside), **metrics}


def _kept(valid: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Tensors in the computing dtype, 0 at tokens without weight."""
    # The gradient there is 0 too, not NaN.
    return [torch.where(valid, x.to(torch.promote_types(x.dtype, torch.float32)), 0.0) for x in tensors]


def _weighted(loss: Tensor, weight: Tensor) -> Tensor:
    kept = torch.where(weight != 0, loss, 0.0)
    return (weight.to(loss.dtype) * kept).sum(dtype=torch.float64).to(loss.dtype)


def _count(tokens: Tensor) -> Tensor:
    return tokens.sum(dtype=torch.float64)


def _error_metrics(value: Tensor, returns: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Metrics as fp64 scalars: VALUE_SUMS without the clip's, and VALUE_MAXIMA."""
    error = torch.where(valid, value - returns, 0.0).double()
    return {
        "tokens_sum": _count(valid),
        "value_error_sum": error.sum(),
        "value_squared_error_sum": error.square().sum(),
        "value_sum": torch.where(valid, value, 0.0).sum(dtype=torch.float64),
        "value_error_max": torch.cat((error.abs(), error.new_zeros(1))).amax(),
    }
