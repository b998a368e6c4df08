"""Figures of a step for its log: mean, spread and extremes over masked tokens, explained variance, load of the experts.
Figures over tokens start as fp64 vectors that add over ranks and batches (extremes combine by maximum), so none depends on the
layout. `telemetry/metrics.py` has the names under which they are logged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megappo.algo.chunks import in_chunks, true_positions

# Returns that vary by less are those of a batch without reward, and only rounding would be explained.
MIN_DEVIATION = 1e-6


class Summary(NamedTuple):
    """Summary of a quantity; nan without valid entries."""

    mean: float
    std: float
    min: float
    max: float


class Moments(NamedTuple):
    """Figures that add over ranks and batches, of one quantity or [K] of several."""

    sums: Tensor
    """fp64 [..., 3]: count, sum, sum of squares."""
    maxima: Tensor
    """fp64 [..., 2]: -min and max, which combine by maximum; -inf without entries."""

    @classmethod
    def joined(cls, parts: Sequence[Moments]) -> Moments:
        sums, maxima = zip(*parts)
        return cls(torch.stack(sums).sum(0), torch.stack(maxima).amax(0))


def masked_moments(x: Tensor, mask: Tensor) -> Moments:
    """Moments of x [T] where mask [T] is true."""
    parts = [moments_of_chunk([chunk], true_positions(where)) for chunk, where in in_chunks(x, mask)]
    return Moments(*(figures[0] for figures in Moments.joined(parts)))


def moments_of_chunk(columns: Sequence[Tensor], counted: Tensor, num_means: int = 0) -> Moments:
    """Moments [K] of several quantities [T] at the positions `counted`, [n] int64.
    num_means: the first so many columns need only the mean; their squares are 0 and their maxima -inf."""
    if not len(counted):
        nothing = torch.zeros(len(columns), 3, dtype=torch.float64)
        return Moments(nothing, nothing[:, :2] - math.inf)
    rows = list[tuple[float, ...]]()
    for number, x in enumerate(columns):
        # A gather by positions takes a third of the time of one by the mask.
        kept = x.index_select(0, counted)
        exact = kept.double()
        if number < num_means:
            rows.append((len(counted), float(exact.sum()), 0.0, -math.inf, -math.inf))
            continue
        lowest, highest = kept.aminmax()
        rows.append((len(counted), float(exact.sum()), float(exact.dot(exact)), -float(lowest), float(highest)))
    # Numbers of Python, and one tensor of all: tensors of one number each would take longer than the sums of a small share.
    sums, maxima = torch.tensor(rows, dtype=torch.float64).split([3, 2], 1)
    return Moments(sums, maxima)


def summarise(sums: Tensor, maxima: Tensor) -> Summary:
    """Turn totals over all ranks into mean, population standard deviation, min and max."""
    count, total, squares = sums.tolist()
    if count == 0:
        return Summary(math.nan, math.nan, math.nan, math.nan)
    mean = total / count
    return Summary(mean, math.sqrt(max(squares / count - mean * mean, 0.0)), -float(maxima[0]), float(maxima[1]))


def explained_variance(returns: Tensor, errors: Tensor) -> float:
    """Explained variance 1 - Var(R - V) / Var(R); nan if the returns do not vary beyond fp32 rounding.
    returns, errors: `Moments.sums` [3] of R and R - V over the same tokens."""
    (count, target, target_squares), (_, error, error_squares) = returns.tolist(), errors.tolist()
    if count == 0:
        return math.nan
    variance = target_squares / count - (target / count) ** 2
    # Equal fp32 returns leave a rounding residue of about 1e-16 of their square. Without any score, returns are the rounding of
    # log-probs, 1e-7 each.
    if variance <= max(1e-14 * target_squares / count, MIN_DEVIATION**2):
        return math.nan
    return 1.0 - (error_squares / count - (error / count) ** 2) / variance


class ExpertLoad(NamedTuple):
    """Balance of the experts' load."""

    max_violation: float
    """Excess of the busiest expert of any layer over its even share, relative to it (MaxVio, arXiv:2408.15664)."""
    idle: float
    """Share of all experts that no token chose."""


def expert_load(tokens: Tensor) -> ExpertLoad:
    """Balance of tokens [layers, experts], the routers' choices over the whole batch. Layers without any (dense) are left out."""
    sparse = tokens[tokens.sum(1) > 0]
    if not len(sparse):
        return ExpertLoad(0.0, 0.0)
    violation = sparse.amax(1) / sparse.mean(1) - 1
    return ExpertLoad(float(violation.max()), float((sparse == 0).double().mean()))
