"""The clipped policy loss and the clipped value loss, with their metrics and their gradient in the same pass.

    torch.ops.megappo.policy_loss  -> loss_sum, dloss/dlogprob [T], sums, maxima
    torch.ops.megappo.value_loss   -> loss_sum, dloss/dvalue [T], sums, maxima

`weight` [T] is mask times aggregation weight (`algo/aggregation.py`); a token with weight 0 takes part in nothing, whatever
stands there. Losses are sums: the caller divides by the global count. Metrics are 0-dim fp64 tensors by name. Those ending in
`_sum` add over micro-batches, ranks and steps, those ending in `_max` combine by maximum; a mean is X_sum / tokens_sum.

Half-precision inputs are computed in fp32, fp64 in fp64; sums are fp64 and do not depend on the number of threads. A NaN of a
token with weight reaches the loss, the gradient of that token and the metrics it is part of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.ops.dispatch import op
from megappo.ops.vocab_stats import compute_dtype

# exp(20) = 4.9e8: ratios are capped here (gradient 0 beyond) instead of overflowing
MAX_LOG_RATIO = 20.0

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
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum of weight * l, metrics), l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(logprob - old_logprob).

    Where A < 0 and dual_clip is given, l is at most -A dual_clip (Ye et al. 2020, eq. 5). All tensors [T]; differentiable with
    respect to `logprob`. PPO: Schulman et al. 2017, eq. 7; different bounds: DAPO, Yu et al. 2025. Metrics: POLICY_SUMS,
    POLICY_MAXIMA. Raises ValueError for tensors of different shapes or devices.
    """
    _check(logprob=logprob, old_logprob=old_logprob, advantage=advantage, weight=weight)
    loss, _, sums, maxima = torch.ops.megappo.policy_loss(logprob, old_logprob, advantage, weight, clip_low, clip_high, dual_clip)
    return loss, _named(POLICY_SUMS, sums, POLICY_MAXIMA, maxima)


def value_loss(
    value: Tensor, old_value: Tensor, returns: Tensor, weight: Tensor, *, clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum of weight * l, metrics), l = max((v - R)^2, (v_clipped - R)^2) / 2, v_clipped within `clip` of old_value.

    All tensors [T]; differentiable with respect to `value`; clip None is the plain squared error and does not read old_value.
    Metrics: VALUE_SUMS, VALUE_MAXIMA. Raises ValueError for tensors of different shapes or devices.
    """
    _check(value=value, old_value=old_value, returns=returns, weight=weight)
    loss, _, sums, maxima = torch.ops.megappo.value_loss(value, old_value, returns, weight, clip)
    return loss, _named(VALUE_SUMS, sums, VALUE_MAXIMA, maxima)


def entropy_loss(entropy: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(-sum of weight * entropy, {"entropy_sum": unweighted sum over tokens with weight}); coef * loss is the entropy bonus."""
    _check(entropy=entropy, weight=weight)
    kept = torch.where(weight != 0, entropy, 0.0)
    return -(weight * kept).sum(), {"entropy_sum": kept.detach().double().sum()}


def _check(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 1:
        raise ValueError("one value per token is wanted, got " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))
    if len({tensor.device for tensor in tensors.values()}) != 1:
        raise ValueError("one device is wanted, got " + ", ".join(f"{name} on {x.device}" for name, x in tensors.items()))
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{name} is {tensor.dtype}: give it a floating type, {name}.float()")


def _named(sum_names: tuple[str, ...], sums: Tensor, max_names: tuple[str, ...], maxima: Tensor) -> dict[str, Tensor]:
    return {**dict(zip(sum_names, sums.detach().unbind())), **dict(zip(max_names, maxima.detach().unbind()))}


def _metrics(valid: Tensor, sums: list[Tensor], maximum: Tensor) -> tuple[Tensor, Tensor]:
    """Per-token quantities -> fp64 ([1 + n] sums, the token count first; [1] maximum, 0 without valid tokens)."""
    columns = [valid, *sums]
    totals = torch.stack([column.sum(dtype=torch.float64) for column in columns])
    return totals, torch.cat((maximum.double(), maximum.new_zeros(1, dtype=torch.float64))).amax().reshape(1)


@op
def _policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    weight: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = compute_dtype(logprob.dtype)
    valid = weight != 0
    log_ratio = torch.where(valid, logprob.to(dtype) - old_logprob.to(dtype), 0.0)
    adv = torch.where(valid, advantage.to(dtype), 0.0)
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = bounded.exp()
    plain = -adv * ratio
    clipped = -adv * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    # strictly: at the bound and inside it both are the same and the gradient is the plain one
    cut = clipped > plain
    loss = torch.where(cut, clipped, plain)
    dual = torch.zeros_like(cut)
    if dual_clip is not None:
        limit = -adv * dual_clip
        dual = (adv < 0) & (loss > limit)
        loss = torch.where(dual, limit, loss)
    # not `bounded != log_ratio`, which holds for NaN and would turn its gradient into 0
    flat = cut | dual | (log_ratio.abs() > MAX_LOG_RATIO)
    w = weight.to(dtype)
    gradient = torch.where(flat, 0.0, w * plain)
    # fp32 would leave few digits of d^2 / 2 where ratios are close to 1, where all of them are at first
    k3 = bounded.double().expm1() - bounded.double()
    sums, maxima = _metrics(
        valid, [cut & (adv < 0), cut & (adv > 0), dual, k3, torch.where(valid, ratio, 0.0)], torch.where(valid, ratio, 0.0)
    )
    return (w * loss).sum(dtype=torch.float64).to(dtype), gradient, sums, maxima


@op
def _value_loss(
    value: Tensor, old_value: Tensor, returns: Tensor, weight: Tensor, clip: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = compute_dtype(value.dtype)
    valid = weight != 0
    new, old, target = (torch.where(valid, x.to(dtype), 0.0) for x in (value, old_value, returns))
    error = new - target
    cut = torch.zeros_like(valid)
    if clip is None:
        loss = error.square()
    else:
        moved = new - old
        # an old value that is NaN would lose every comparison
        error = torch.where(moved.isnan(), moved, error)
        clipped = (old + moved.clamp(-clip, clip) - target).square()
        # inside the clip both are the same up to rounding: only tokens outside may be cut
        cut = (clipped > error.square()) & (moved.abs() > clip)
        loss = torch.where(cut, clipped, error.square())
    w = weight.to(dtype)
    gradient = torch.where(cut, 0.0, w * error)
    sums, maxima = _metrics(valid, [cut, error, error.square(), new], error.abs())
    return 0.5 * (w * loss).sum(dtype=torch.float64).to(dtype), gradient, sums, maxima


def _fake(num_sums: int, num_maxima: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = compute_dtype(x.dtype)
    return (
        x.new_empty((), dtype=dtype),
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(num_sums, dtype=torch.float64),
        x.new_empty(num_maxima, dtype=torch.float64),
    )


def _save_gradient(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1])
    ctx.dtype = inputs[0].dtype


@_policy_loss.register_fake
def _(logprob, *args):
    return _fake(len(POLICY_SUMS), len(POLICY_MAXIMA), logprob)


@_value_loss.register_fake
def _(value, *args):
    return _fake(len(VALUE_SUMS), len(VALUE_MAXIMA), value)


def _policy_backward(ctx, g_loss, *g_metrics):
    return (g_loss * ctx.saved_tensors[0]).to(ctx.dtype), None, None, None, None, None, None


def _value_backward(ctx, g_loss, *g_metrics):
    return (g_loss * ctx.saved_tensors[0]).to(ctx.dtype), None, None, None, None


_policy_loss.register_autograd(_policy_backward, setup_context=_save_gradient)
_value_loss.register_autograd(_value_backward, setup_context=_save_gradient)
