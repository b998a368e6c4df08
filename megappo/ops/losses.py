"""Clipped policy loss and clipped value loss, with metrics and gradient in the same pass; `algo/losses.py` has the formulas.

    torch.ops.megappo.policy_loss  -> loss_sum, dloss/dlogprob [T], sums, maxima
    torch.ops.megappo.value_loss   -> loss_sum, dloss/dvalue [T], sums, maxima

Metrics are 0-dim fp64 tensors by name: X_sum adds over micro-batches, ranks and steps, X_max combines by maximum; a mean is X_sum /
tokens_sum. Sums do not depend on the number of threads. A NaN of a token with weight reaches the loss, that token's gradient and
its metrics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algo import losses as reference
from megappo.algo.losses import POLICY_MAXIMA, POLICY_SUMS, VALUE_MAXIMA, VALUE_SUMS, check_per_token
from megappo.ops.dispatch import op
from megappo.ops.vocab_stats import compute_dtype


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
    """Compute (sum of weight * l, metrics), l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(logprob - old_logprob).

    Where A < 0 and dual_clip is given, l is at most -A dual_clip (Ye et al. 2020, eq. 5). All tensors [T]; differentiable by
    `logprob`. PPO: Schulman et al. 2017, eq. 7; different bounds: DAPO, Yu et al. 2025. Metrics: POLICY_SUMS, POLICY_MAXIMA. Raises
    ValueError for tensors of different shapes or devices.
    """
    check_per_token(logprob=logprob, old_logprob=old_logprob, advantage=advantage, weight=weight)
    loss, _, sums, maxima = torch.ops.megappo.policy_loss(logprob, old_logprob, advantage, weight, clip_low, clip_high, dual_clip)
    return loss, _named(POLICY_SUMS, sums, POLICY_MAXIMA, maxima)


def value_loss(
    value: Tensor, old_value: Tensor, returns: Tensor, weight: Tensor, *, clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute (sum of weight * l, metrics), l = max((v - R)^2, (v_clipped - R)^2) / 2, v_clipped within `clip` of old_value.
    All tensors [T]; differentiable by `value`; clip None is the plain squared error and does not read old_value. Metrics:
    VALUE_SUMS, VALUE_MAXIMA. Raises ValueError for tensors of different shapes or devices."""
    check_per_token(value=value, old_value=old_value, returns=returns, weight=weight)
    loss, _, sums, maxima = torch.ops.megappo.value_loss(value, old_value, returns, weight, clip)
    return loss, _named(VALUE_SUMS, sums, VALUE_MAXIMA, maxima)


def _named(sum_names: tuple[str, ...], sums: Tensor, max_names: tuple[str, ...], maxima: Tensor) -> dict[str, Tensor]:
    return {**dict(zip(sum_names, sums.detach().unbind())), **dict(zip(max_names, maxima.detach().unbind()))}


_policy_loss = op(reference.policy_loss, file=__name__)
_value_loss = op(reference.value_loss, file=__name__)


def _fake(num_sums: int, num_maxima: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = compute_dtype(x.dtype)
    return (
        x.new_empty((), dtype=dtype),
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(num_sums, dtype=torch.float64),
        x.new_empty(num_maxima, dtype=torch.float64),
    )


def _save_gradient(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1])  # the gradient came with the loss: the backward only scales it
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
