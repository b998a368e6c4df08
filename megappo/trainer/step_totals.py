"""Moments of a step's samples, tokens and turns over all ranks for its report: one exchange of sums and one of maxima."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megappo.algo.aggregation import in_chunks, true_positions
from megappo.algo.kl import kl_of_log_ratio
from megappo.algo.summaries import Moments, Summary, masked_moments, moments_of_chunk, summarise
from megappo.data.packing import PackedBatch
from megappo.parallel.totals import totals_and_maxima
from megappo.rollout.types import Played
from megappo.trainer.critics import critics_in


class Totals:
    """Moments of named quantities over all ranks, and further sums: fp64 vectors without maxima."""

    def __init__(self, moments: Mapping[str, Moments], further: Mapping[str, Tensor] = {}) -> None:
        """Exchange the sums and maxima. Collective over the world, with the same names on every rank."""
        sums, maxima = {name: one.sums for name, one in moments.items()}, {name: one.maxima for name, one in moments.items()}
        self._sums, self._maxima = totals_and_maxima({**sums, **further}, maxima)

    def __getitem__(self, name: str) -> Tensor:
        return self._sums[name]

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def summary(self, name: str) -> Summary:
        return summarise(self._sums[name], self._maxima[name])

    def mean(self, name: str) -> float:
        """Return the mean; 0 without entries."""
        count, total = self._sums[name][:2].tolist()
        return total / count if count else 0.0


def moments_of_tokens(
    batch: PackedBatch,
    targets: Tensor,
    of_sampled: Sequence[str] = (),
    means: Sequence[str] = (),
    kl_kinds: Collection[str] = (),
) -> dict[str, Moments]:
    """Return name -> moments over this rank's tokens: `of_sampled` over sampled tokens; values, returns and errors (`error FIELD`:
    return minus value) of every critic over tokens with a target. targets: [T] bool. means: fields that need only a mean.
    kl_kinds: estimators of the KL to the reference, as `kl KIND`, if the batch has its log-probs.
    """
    mask, critics = batch["response_mask"], critics_in(batch).values()
    of_critics = [name for one in critics for name in (one.value, one.returns)]
    names = [*means, *of_sampled, *of_critics]
    kinds = sorted(kl_kinds) if kl_kinds and "ref_logprob" in batch else []
    read = [*names, "logprob", "ref_logprob"] if kinds else names
    of_targets = [*of_critics, *(f"error {one.value}" for one in critics)]
    of_mask, num_means = [*(f"kl {kind}" for kind in kinds), *means, *of_sampled], len(kinds) + len(means)
    groups = [[*of_mask, *of_targets], []] if targets is mask else [of_mask, of_targets]
    parts: list[list[Moments]] = [[], []]
    for sampled, learned, *chunk in in_chunks(mask, targets, *(batch[name] for name in read)):
        values = dict(zip(names, chunk))
        if kinds:
            log_ratio = chunk[-2] - chunk[-1]
            values |= {f"kl {kind}": kl_of_log_ratio(log_ratio, kind) for kind in kinds}
        values |= {f"error {one.value}": values[one.returns].double() - values[one.value] for one in critics}
        for where, group, count, found in zip((sampled, learned), groups, (num_means, 0), parts):
            if group:
                found.append(moments_of_chunk([values[name] for name in group], true_positions(where), count))
    return {
        name: Moments(*of_name)
        for group, found in zip(groups, parts)
        if group
        for name, *of_name in zip(group, *Moments.joined(found))
    }


def moments_of_turns(played: Sequence[Played]) -> dict[str, Moments]:
    """Return name -> moments over the trajectories that this rank drew in an environment, and over its calls there."""
    columns = {
        "turns": [one.turns for one in played],
        "turns limited": [one.reached_limit for one in played],
        "turns late": [one.is_late for one in played],
        "turn seconds": [seconds for one in played for seconds in one.seconds],
    }
    values: dict[str, Tensor] = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    return {name: masked_moments(x, torch.ones(x.shape, dtype=torch.bool)) for name, x in values.items()}


class Answers(NamedTuple):
    """Seconds of the environment's calls: mean, slowest, and total over all ranks and workers."""

    mean_s: float
    max_s: float
    total_s: float


class Turns(NamedTuple):
    """Turns per trajectory over all ranks, and the shares of trajectories ended by `max_turns` (limited) and by a late answer
    (late). answers: None if the environment was never asked."""

    mean: float
    max: float
    limited: float
    late: float
    answers: Answers | None

    @classmethod
    def of(cls, totals: Totals) -> Turns | None:
        """Read the turns from totals with `moments_of_turns`; None without an environment."""
        if not float(totals["turns"][0]):
            return None
        turns, answers = totals.summary("turns"), None
        if float(totals["turn seconds"][0]):
            calls = totals.summary("turn seconds")
            answers = Answers(calls.mean, calls.max, float(totals["turn seconds"][1]))
        return cls(turns.mean, turns.max, totals.mean("turns limited"), totals.mean("turns late"), answers)
