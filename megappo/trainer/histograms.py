"""Distributions of a step for the trackers, over the sampled tokens of the whole batch: the same on every rank and layout."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algo.aggregation import tokens_per_sequence
from megappo.algo.kl import kl_estimate
from megappo.algo.ratio_bins import ratio_histogram
from megappo.telemetry.metrics import Distribution
from megappo.telemetry.trackers.base import Histogram
from megappo.trainer.report import StepRecord

NUM_BINS = 64  # TensorBoard shows about 30


def histograms_of(record: StepRecord) -> dict[str, Histogram]:
    """Name -> histogram. Ratios are those of all updates of the step, if the policy counted them; KL needs a reference."""
    batch = record.batch
    mask = batch["response_mask"]
    values = {
        Distribution.ADVANTAGE: batch["raw_advantage"][mask],
        Distribution.VALUE: batch["value"][mask],
        Distribution.RETURN: batch["returns"][mask],
        Distribution.RESPONSE: tokens_per_sequence(mask, batch.cu_seqlens),
        Distribution.SCORE: torch.tensor(record.scored.total),
    }
    if "ref_logprob" in batch:
        values[Distribution.KL] = kl_estimate(batch["logprob"], batch["ref_logprob"], record.kl_estimator)[mask]
    found = {name.value: even_histogram(x) for name, x in values.items() if x.numel()}
    if (ratios := ratio_histogram(record.policy.sums)) is not None:
        found[Distribution.RATIO.value] = Histogram(tuple(ratios[0]), tuple(ratios[1]))
    return found


def even_histogram(x: Tensor, num_bins: int = NUM_BINS) -> Histogram:
    """Histogram of finite values [n > 0] in even bins from the smallest to the largest; a single value gets one bin around it."""
    x = x.detach().double().cpu()
    low, high = float(x.min()), float(x.max())
    if low == high:
        margin = max(abs(low), 1.0) * 0.5
        return Histogram((x.numel(),), (low - margin, high + margin))
    counts, edges = torch.histogram(x, num_bins, range=(low, high))
    return Histogram(tuple(int(count) for count in counts), tuple(edges.tolist()))
