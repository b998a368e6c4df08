"""Token losses of PPO: clipped policy loss, clipped value loss, entropy bonus, negative log-likelihood.
`weight` [T] is mask times aggregation weight (`aggregation.py`); a token with weight 0 is ignored, even if NaN. Losses are sums:
the caller divides by the global count. The clipped losses return their gradient and metrics too; `ops/losses.py` makes them
differentiable. Half-precision inputs are computed in fp32, fp64 in fp64; sums are fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algo.kl import MAX_LOG_RATIO, kl_of_log_ratio

POLICY_SUMS = ("tokens_sum", "clip_low_sum", "clip_high_sum", "dual_clip_sum", "approx_kl_sum", "ratio_sum")
"""Tokens; tokens whose gradient was cut by the lower, upper and dual clip; k3 estimate of KL(old || new); ratio."""
POLICY_MAXIMA = ("ratio_max",)
"""Largest ratio new / old."""
VALUE_SUMS = ("tokens_sum", "value_clip_sum", "value_error_sum", "value_squared_error_sum", "value_sum")
"""Tokens; tokens whose gradient was cut by the clip; value - return; its square; value."""
VALUE_MAXIMA = ("value_error_max",)
"""Largest |value - return|."""


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    weight: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute (loss sum, its gradient by logprob [T], POLICY_SUMS, POLICY_MAXIMA): the reference of `ops.losses.policy_loss`."""
    dtype = torch.promote_types(logprob.dtype, torch.float32)
    valid = weight != 0
    log_ratio = torch.where(valid, logprob.to(dtype) - old_logprob.to(dtype), 0.0)
    adv = torch.where(valid, advantage.to(dtype), 0.0)
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = bounded.exp()
    plain = -adv * ratio
    clipped = -adv * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    # Strictly greater: inside the bounds and at them both are equal, and the gradient is the plain one.
    cut = clipped > plain
    loss = torch.where(cut, clipped, plain)
    dual = torch.zeros_like(cut)
    if dual_clip is not None:
        limit = -adv * dual_clip
        dual = (adv < 0) & (loss > limit)
        loss = torch.where(dual, limit, loss)
    # Not `bounded != log_ratio`, which is true for NaN and would turn its gradient into 0.
    flat = cut | dual | (log_ratio.abs() > MAX_LOG_RATIO)
    w = weight.to(dtype)
    gradient = torch.where(flat, 0.0, w * plain)
    # fp64: fp32 leaves few digits of d^2 / 2 for ratios close to 1, as all are in the first update.
    approx_kl = kl_of_log_ratio(-bounded.double(), "k3")
    sums, maxima = _metrics(
        valid, [cut & (adv < 0), cut & (adv > 0), dual, approx_kl, torch.where(valid, ratio, 0.0)], torch.where(valid, ratio, 0.0)
    )
    return (w * loss).sum(dtype=torch.float64).to(dtype), gradient, sums, maxima


def value_loss(
    value: Tensor, old_value: Tensor, returns: Tensor, weight: Tensor, clip: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute (loss sum, its gradient by value [T], VALUE_SUMS, VALUE_MAXIMA): the reference of `ops.losses.value_loss`."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    valid = weight != 0
    new, old, target = (torch.where(valid, x.to(dtype), 0.0) for x in (value, old_value, returns))
    error = new - target
    cut = torch.zeros_like(valid)
    if clip is None:
        loss = error.square()
    else:
        moved = new - old
        # A NaN in the old value would lose every comparison and disappear.
        error = torch.where(moved.isnan(), moved, error)
        clipped = (old + moved.clamp(-clip, clip) - target).square()
        # Inside the clip both are equal up to rounding: only tokens outside may be cut.
        cut = (clipped > error.square()) & (moved.abs() > clip)
        loss = torch.where(cut, clipped, error.square())
    w = weight.to(dtype)
    gradient = torch.where(cut, 0.0, w * error)
    sums, maxima = _metrics(valid, [cut, error, error.square(), new], error.abs())
    return 0.5 * (w * loss).sum(dtype=torch.float64).to(dtype), gradient, sums, maxima


def entropy_loss(entropy: Tensor, weight: Tensor) -> Tensor:
    """Minus the sum of weight * entropy, both [T]. The entropy bonus is coef * loss. Raises ValueError as `check_per_token`."""
    check_per_token(entropy=entropy, weight=weight)
    kept = torch.where(weight != 0, entropy, 0.0)
    return -(weight * kept).sum()


def nll_loss(logprob: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute (minus the sum of weight * logprob, {"nll_sum": unweighted fp64 sum, "nll_tokens_sum": tokens with weight}).
    Both tensors [T]; differentiable by `logprob`. VAPO's positive-example loss (Yue et al. 2025, arXiv:2504.05118, eq. 12)."""
    check_per_token(logprob=logprob, weight=weight)
    chosen = weight != 0
    kept = torch.where(chosen, logprob, 0.0)
    return -(weight * kept).sum(), {"nll_sum": -kept.detach().double().sum(), "nll_tokens_sum": chosen.sum(dtype=torch.float64)}


def check_per_token(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors are floating-point [T], of one T and on one device."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 1:
        raise ValueError("one value per token is wanted, got " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))
    if len({tensor.device for tensor in tensors.values()}) != 1:
        raise ValueError("one device is wanted, got " + ", ".join(f"{name} on {x.device}" for name, x in tensors.items()))
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{name} is {tensor.dtype}: give it a floating type, {name}.float()")


def _metrics(valid: Tensor, sums: list[Tensor], maximum: Tensor) -> tuple[Tensor, Tensor]:
    """Sum per-token quantities in fp64: ([1 + n] sums, the token count first; [1] maximum, 0 without valid tokens)."""
    columns = [valid, *sums]
    totals = torch.stack([column.sum(dtype=torch.float64) for column in columns])
    return totals, torch.cat((maximum.double(), maximum.new_zeros(1, dtype=torch.float64))).amax().reshape(1)
