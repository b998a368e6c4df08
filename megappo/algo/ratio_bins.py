"""Counts of the probability ratios pi / pi_old in fixed bins, as sums that add over micro-batches, ranks and updates.
The bins are even in the logarithm of |log ratio|, so they resolve steps of 1e-4 as well as of 10; one bin is around the ratio 1."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

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
