"""Figures of a step for its log: mean, spread and extremes over masked tokens, explained variance, load of the experts.
Figures over tokens start as fp64 vectors that add over ranks and batches (extremes combine by maximum), so none depends on the
layout. `telemetry/metrics.py` has the names under which they are logged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megappo.algo.aggregation import in_chunks, true_positions

SMALLEST, LARGEST = 1e-5, 10.0  # |log ratio|: fp32 rounding of a log-prob of -10 is 1e-6
PER_DECADE = 4
_STEPS = round(PER_DECADE * math.log10(LARGEST / SMALLEST))
_POSITIVE = tuple(SMALLEST * 10 ** (step / PER_DECADE) for step in range(_STEPS + 1))
LOG_EDGES = (*(-x for x in reversed(_POSITIVE)), *_POSITIVE)
"""Borders of the bins in log ratio, ascending. The first and the last bin also count everything beyond them."""
NAMES = tuple(f"ratio_bin_{index:02d}_sum" for index in range(len(LOG_EDGES) - 1))
"""Names of the counts among the sums of an update."""


def ratio_counts(logprob: Tensor, old_logprob: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Count the tokens with weight in each bin: NAMES -> 0-dim fp64. All arguments [T]. A NaN ratio is counted in the first bin."""
    valid = weight != 0
    log_ratio = torch.where(valid, logprob.detach().double() - old_logprob.double(), -math.inf)
    inner = log_ratio.new_tensor(LOG_EDGES[1:-1])
    # Comparisons and sums, not bincount: its atomic additions on a GPU are refused under deterministic algorithms.
    above = (log_ratio[:, None] >= inner).sum(0, dtype=torch.float64)
    ends = above.new_zeros(1)
    counts = torch.cat((valid.sum(dtype=torch.float64).reshape(1), above)) - torch.cat((above, ends))
    return dict(zip(NAMES, counts.unbind()))


def ratio_histogram(sums: Mapping[str, float]) -> tuple[list[int], list[float]] | None:
    """Make (counts, edges of the ratio) of summed `ratio_counts`, without empty bins at the ends; None if nothing was counted."""
    counts = [round(sums.get(name, 0.0)) for name in NAMES]
    filled = [index for index, count in enumerate(counts) if count]
    if not filled:
        return None
    first, last = filled[0], filled[-1] + 1
    return counts[first:last], [math.exp(edge) for edge in LOG_EDGES[first : last + 1]]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k responses is correct: 1 - C(n - correct, k) / C(n, k).
    This is the share of the subsets of k responses that hold a correct one (Chen et al. 2021, arXiv:2107.03374, eq. 1)."""
    assert 1 <= k <= n and 0 <= correct <= n, f"pass@{k} of {correct} correct in {n}"
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(correct: Sequence[bool], answers: Sequence[Hashable | None]) -> float:
    """Correctness of the answer that most of the n responses give; 0 if no response has an answer.
    answers: one per response, equal for equal answers; None does not vote. A tie counts as the mean over the tied answers, which
    is what a fair draw among them is worth."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    # Responses with one answer are equally correct, unless the score counts more than the answer.
    winners = [right for right, answer in zip(correct, answers, strict=True) if answer is not None and votes[answer] == most]
    return sum(winners) / len(winners)


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean of independent values; 0 for one value."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


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
    """Moments [K], on the host, of several quantities [T] at the positions `counted`, [n] int64.
    num_means: the first so many columns need only the mean; their squares are 0 and their maxima -inf."""
    if not len(counted):
        nothing = torch.zeros(len(columns), 3, dtype=torch.float64)
        return Moments(nothing, nothing[:, :2] - math.inf)
    figures = list[Tensor]()
    for number, x in enumerate(columns):
        # A gather by positions takes a third of the time of one by the mask.
        kept = x.index_select(0, counted)
        exact = kept.double()
        figures.append(exact.sum())
        if number >= num_means:
            figures += (exact.dot(exact), *(x.double() for x in kept.aminmax()))
    # Read at once: columns on a device are waited for once.
    read = iter(torch.stack(figures).tolist())
    # Numbers of Python, and one tensor of all: tensors of one number each would take longer than the sums of a small share.
    rows = list[tuple[float, ...]]()
    for number in range(len(columns)):
        added, no_more = next(read), (0.0, math.inf, -math.inf)
        squares, lowest, highest = no_more if number < num_means else (next(read), next(read), next(read))
        rows.append((len(counted), added, squares, -lowest, highest))
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
