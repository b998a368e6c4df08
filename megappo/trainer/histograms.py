"""Distributions of a step for the trackers, over the sampled tokens of the whole batch: the same on every rank and layout."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megappo.algo.kl import kl_estimate
from megappo.algo.ratio_bins import ratio_histogram
from megappo.parallel.totals import maxima, totals
from megappo.telemetry.metrics import Distribution, of_critic
from megappo.telemetry.trackers.base import Histogram
from megappo.trainer.critic_report import targets_in
from megappo.trainer.critics import critics_in
from megappo.trainer.report import StepRecord

NUM_BINS = 64  # TensorBoard shows about 30


def histograms_of(record: StepRecord) -> dict[str, Histogram]:
    """Name -> histogram. Ratios are those of all updates of the step, if the policy counted them. KL needs a reference, values
    and returns a critic.

    Collective over the world.
    """
    batch = record.batch
    mask, table, numbers = batch["response_mask"], record.experience.table, record.experience.numbers
    ends = table.ends[numbers]
    values = {
        Distribution.ADVANTAGE: batch["raw_advantage"][mask],
        Distribution.RESPONSE: table.response[numbers][ends],
        Distribution.SCORE: torch.tensor(record.scored.total)[ends],
    }
    of_critics = {
        of_critic(name.value, role): batch[field][targets_in(record.batch)]
        for role, fields in critics_in(batch).items()
        for name, field in ((Distribution.VALUE, fields.value), (Distribution.RETURN, fields.returns))
    }
    if "ref_logprob" in batch:
        values[Distribution.KL] = kl_estimate(batch["logprob"], batch["ref_logprob"], record.kl)[mask]
    found = even_histograms({name.value: x for name, x in values.items()} | of_critics)
    if (ratios := ratio_histogram(record.policy.sums)) is not None:
        found[Distribution.RATIO.value] = Histogram(tuple(ratios[0]), tuple(ratios[1]))
    return found


def even_histograms(values: Mapping[str, Tensor]) -> dict[str, Histogram]:
    """Histograms of the finite values [n] of all ranks, in even bins from the smallest to the largest; a single value gets one bin
    around it, and names without any value are left out. Collective over the world."""
    exact = {name: x.detach().double().cpu() for name, x in values.items()}
    none = torch.full((1,), -math.inf, dtype=torch.float64)
    ends = maxima({name: torch.stack([torch.cat([-x, none]).max(), torch.cat([x, none]).max()]) for name, x in exact.items()})
    ranges = {name: (-float(low), float(high)) for name, (low, high) in ends.items() if high > -math.inf}
    counted = totals({name: _counts(exact[name], ends_of) for name, ends_of in ranges.items()})
    return {name: _histogram(counted[name], ends_of) for name, ends_of in ranges.items()}


def _counts(x: Tensor, ends: tuple[float, float]) -> Tensor:
    if ends[0] == ends[1] or not x.numel():
        return torch.tensor([x.numel()] + [0] * (NUM_BINS - 1), dtype=torch.float64)
    return torch.histogram(x, NUM_BINS, range=ends).hist


def _histogram(counts: Tensor, ends: tuple[float, float]) -> Histogram:
    low, high = ends
    if low == high:
        margin = max(abs(low), 1.0) * 0.5
        return Histogram((int(counts.sum()),), (low - margin, high + margin))
    # The edges that `torch.histogram` counts by.
    edges = torch.histogram(torch.empty(0, dtype=torch.float64), len(counts), range=ends).bin_edges
    return Histogram(tuple(int(count) for count in counts), tuple(edges.tolist()))
