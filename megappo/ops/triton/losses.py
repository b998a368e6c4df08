"""Triton twin of `ops/losses.py`.
One program per 1024 tokens writes fp64 partial results [results, programs]; one program adds them in order. Without atomics, a
result depends on the tokens only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megappo.algo import kl
from megappo.algo.losses import POLICY_SUMS, VALUE_SUMS

BLOCK = 1024  # tokens of a program
INFINITY = float("inf")  # a dual clip that bounds nothing
MAX_LOG_RATIO = tl.constexpr(kl.MAX_LOG_RATIO)


@triton.jit
def _nan_max(x):
    """Maximum of a block of numbers >= 0, or NaN if any is NaN (tl.max may drop it)."""
    hidden = tl.sum((x != x).to(tl.int32), axis=0)
    return tl.where(hidden > 0, float("nan"), tl.max(tl.where(x != x, 0.0, x), axis=0))


@triton.jit
def _put(partials, row: tl.constexpr, x):
    """Store the sum of `x` in row `row` of this program's column."""
    tl.store(partials + row * tl.num_programs(0) + tl.program_id(0), tl.sum(x.to(tl.float64), axis=0))


@triton.jit
def _load(from_, at, inside, valid):
    x = tl.load(from_ + at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(valid, x, 0.0)


@triton.jit
def _policy_loss(logprob, old_logprob, advantage, weight, gradient, partials, num_tokens, low, high, dual, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    valid = w != 0.0
    log_ratio = _load(logprob, at, inside, valid) - _load(old_logprob, at, inside, valid)
    adv = _load(advantage, at, inside, valid)
    # Comparisons with NaN are false, so NaN is not bounded and stays visible in the result.
    above, below = log_ratio > MAX_LOG_RATIO, log_ratio < -MAX_LOG_RATIO
    bounded = tl.where(above, MAX_LOG_RATIO, tl.where(below, -MAX_LOG_RATIO, log_ratio))
    ratio = tl.exp(bounded)
    plain = -adv * ratio
    clipped = -adv * tl.where(ratio < low, low, tl.where(ratio > high, high, ratio))
    # Strictly greater: inside the bounds and at them both are equal, and the gradient is the plain one.
    cut = clipped > plain
    loss = tl.where(cut, clipped, plain)
    limit = -adv * dual
    dual_cut = (adv < 0.0) & (loss > limit)
    loss = tl.where(dual_cut, limit, loss)
    tl.store(gradient + at, tl.where(cut | dual_cut | above | below, 0.0, w * plain), mask=inside)
    # exp(d) - 1 - d by its series if d is small: the subtraction would cancel most of d^2 / 2.
    d = bounded
    series = d * d * (0.5 + d * (1.0 / 6 + d * (1.0 / 24 + d * (1.0 / 120 + d * (1.0 / 720 + d * (1.0 / 5040))))))
    _put(partials, 0, valid)
    _put(partials, 1, cut & (adv < 0.0))
    _put(partials, 2, cut & (adv > 0.0))
    _put(partials, 3, dual_cut)
    _put(partials, 4, tl.where(tl.abs(d) < 0.35, series, ratio - 1.0 - d))
    _put(partials, 5, tl.where(valid, ratio, 0.0))
    _put(partials, 6, w * loss)
    tl.store(partials + 7 * tl.num_programs(0) + tl.program_id(0), _nan_max(tl.where(valid, ratio, 0.0)).to(tl.float64))


@triton.jit
def _value_loss(value, old_value, returns, weight, gradient, partials, num_tokens, clip, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    valid = w != 0.0
    new, target = _load(value, at, inside, valid), _load(returns, at, inside, valid)
    error = new - target
    squared = error * error
    cut = squared < 0.0  # all false
    if clip is not None:
        old = _load(old_value, at, inside, valid)
        moved = new - old
        # A NaN in the old value would lose every comparison and disappear.
        error = tl.where(moved != moved, moved, error)
        squared = error * error
        clipped = old + tl.where(moved < -clip, -clip, tl.where(moved > clip, clip, moved)) - target
        # Inside the clip both are equal up to rounding: only tokens outside may be cut.
        cut = (clipped * clipped > squared) & (tl.abs(moved) > clip)
        loss = tl.where(cut, clipped * clipped, squared)
    else:
        loss = squared
    tl.store(gradient + at, tl.where(cut, 0.0, w * error), mask=inside)
    _put(partials, 0, valid)
    _put(partials, 1, cut)
    _put(partials, 2, error)
    _put(partials, 3, squared)
    _put(partials, 4, new)
    _put(partials, 5, 0.5 * w * loss)
    tl.store(partials + 6 * tl.num_programs(0) + tl.program_id(0), _nan_max(tl.abs(error)).to(tl.float64))


@triton.jit
def _total(partials, sums, loss, maximum, num_blocks, NUM_SUMS: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    # In ascending order and without atomics: a sum depends on the tokens only.
    for row in tl.static_range(NUM_SUMS + 1):
        total = tl.zeros((BLOCK,), dtype=tl.float64)
        for start in range(0, num_blocks, BLOCK):
            total += tl.load(partials + row * num_blocks + start + lane, mask=start + lane < num_blocks, other=0.0)
        if row < NUM_SUMS:
            tl.store(sums + row, tl.sum(total, axis=0))
        else:
            tl.store(loss, tl.sum(total, axis=0).to(tl.float32))
    most = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, num_blocks, BLOCK):
        x = tl.load(partials + (NUM_SUMS + 1) * num_blocks + start + lane, mask=start + lane < num_blocks, other=0.0)
        most = tl.where((x > most) | (x != x), x, most)
    tl.store(maximum, _nan_max(most))


class _Results:
    def __init__(self, like: Tensor, num_sums: int) -> None:
        self.num_tokens, self.num_sums = like.numel(), num_sums
        self.num_blocks = triton.cdiv(self.num_tokens, BLOCK)
        self.loss = torch.empty((), dtype=torch.float32, device=like.device)
        self.gradient = torch.empty(self.num_tokens, dtype=torch.float32, device=like.device)
        self.sums, self.maxima, self.partials = (
            torch.empty(size, dtype=torch.float64, device=like.device) for size in (num_sums, 1, (num_sums + 2) * self.num_blocks)
        )

    def total(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _total[(1,)](self.partials, self.sums, self.loss, self.maxima, self.num_blocks, NUM_SUMS=self.num_sums, BLOCK=BLOCK)
        return self.loss, self.gradient, self.sums, self.maxima


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    weight: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `megappo.ops.losses.policy_loss`."""
    out = _Results(logprob, len(POLICY_SUMS))
    if out.num_blocks:
        _policy_loss[(out.num_blocks,)](
            *(x.contiguous() for x in (logprob, old_logprob, advantage, weight)),
            out.gradient,
            out.partials,
            out.num_tokens,
            1.0 - clip_low,
            1.0 + clip_high,
            INFINITY if dual_clip is None else dual_clip,
            BLOCK=BLOCK,
        )
    return out.total()


def value_loss(
    value: Tensor, old_value: Tensor, returns: Tensor, weight: Tensor, clip: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `megappo.ops.losses.value_loss`."""
    out = _Results(value, len(VALUE_SUMS))
    if out.num_blocks:
        _value_loss[(out.num_blocks,)](
            *(x.contiguous() for x in (value, old_value, returns, weight)),
            out.gradient,
            out.partials,
            out.num_tokens,
            clip,
            BLOCK=BLOCK,
        )
    return out.total()
