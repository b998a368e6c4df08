"""Moments of a step's samples, tokens and turns over all ranks for its report: one exchange of sums and one of maxima."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megappo.algo.aggregation import in_chunks, true_positions
from megappo.algo.kl import kl_of_log_ratio
from megappo.algo.summaries import Moments, Summary, expert_load, explained_variance, masked_moments, moments_of_chunk, summarise
from megappo.data.packing import PackedBatch
from megappo.parallel.totals import totals_and_maxima
from megappo.rollout.types import Played
from megappo.telemetry.metrics import Metric, of_critic
from megappo.trainer.critics import CriticFields, critics_in
from megappo.trainer.updates import UpdateSummary


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

    def figures(self, name: str, prefix: str) -> dict[str, float]:
        """Return mean, std, min and max as metrics: `PREFIX_mean`, ..."""
        return {f"{prefix}_{key}": value for key, value in self.summary(name)._asdict().items()}

    def mean(self, name: str) -> float:
        """Return the mean; 0 without entries."""
        count, total = self._sums[name][:2].tolist()
        return total / count if count else 0.0


def moments_of_tokens(
    batch: PackedBatch, targets: Tensor, of_sampled: Sequence[str] = (), means: Sequence[str] = (), kl_kinds: Collection[str] = ()
) -> dict[str, Moments]:
    """Return name -> moments over this rank's tokens: `of_sampled` over sampled tokens; values, returns and errors (`error FIELD`:
    return minus value) of every critic over tokens with a target. targets: [T] bool. means: fields that need only a mean.
    kl_kinds: estimators of the KL to the reference, as `kl KIND`, if the batch has its log-probs; with any, also `kl teacher`.
    """
    mask, critics = batch["response_mask"], critics_in(batch).values()
    of_critics = [name for one in critics for name in (one.value, one.returns)]
    names = [*means, *of_sampled, *of_critics]
    kinds_of = {"ref_logprob": sorted(kl_kinds), "teacher_logprob": ["teacher"] if kl_kinds else []}
    of_kl = {field: kinds for field, kinds in kinds_of.items() if kinds and field in batch}
    kinds = [kind for found in of_kl.values() for kind in found]
    read = [*names, "logprob", *of_kl] if of_kl else names
    of_targets = [*of_critics, *(f"error {one.value}" for one in critics)]
    of_mask, num_means = [*(f"kl {kind}" for kind in kinds), *means, *of_sampled], len(kinds) + len(means)
    groups = [[*of_mask, *of_targets], []] if targets is mask else [of_mask, of_targets]
    parts: list[list[Moments]] = [[], []]
    for sampled, learned, *chunk in in_chunks(mask, targets, *(batch[name] for name in read)):
        values = dict(zip(read, chunk))
        for field, found in of_kl.items():
            log_ratio = values["logprob"] - values[field]
            values |= {f"kl {kind}": kl_of_log_ratio(log_ratio, "k1" if kind == "teacher" else kind) for kind in found}
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


class Turns(NamedTuple):
    """Turns per trajectory over all ranks, and the shares of trajectories ended by `max_turns` (limited) and by a late answer
    (late). answers: seconds of the environment's calls, mean_s, max_s and total_s over all ranks and workers; empty if it was never
    asked."""

    mean: float
    max: float
    limited: float
    late: float
    answers: Mapping[str, float]

    def metrics(self) -> dict[str, float]:
        return {
            Metric.TURNS_MEAN.value: self.mean,
            Metric.TURNS_MAX.value: self.max,
            Metric.TURNS_LIMITED.value: self.limited,
            Metric.TURNS_LATE.value: self.late,
        }

    @classmethod
    def of(cls, totals: Totals) -> Turns | None:
        """Read the turns from totals with `moments_of_turns`; None without an environment."""
        if not float(totals["turns"][0]):
            return None
        turns, calls, (count, total_s, *_) = (
            totals.summary("turns"),
            totals.summary("turn seconds"),
            totals["turn seconds"].tolist(),
        )
        answers = {"mean_s": calls.mean, "max_s": calls.max, "total_s": total_s} if count else {}
        return cls(turns.mean, turns.max, totals.mean("turns limited"), totals.mean("turns late"), answers)


_EXPERT_METRICS = {
    "policy": (Metric.POLICY_EXPERT_VIOLATION, Metric.POLICY_EXPERTS_IDLE, Metric.POLICY_BALANCE_LOSS),
    "critic": (Metric.CRITIC_EXPERT_VIOLATION, Metric.CRITIC_EXPERTS_IDLE, Metric.CRITIC_BALANCE_LOSS),
    "sft": (Metric.SFT_EXPERT_VIOLATION, Metric.SFT_EXPERTS_IDLE, Metric.SFT_BALANCE_LOSS),
}


def expert_metrics(role: Literal["policy", "critic", "sft"], tokens: Tensor | None, balance_loss: float) -> dict[str, float]:
    """Return the metrics of a role's experts. tokens: [layers, experts] sent to each; None for a dense model, which has no
    metrics."""
    if tokens is None:
        return {}
    load = expert_load(tokens)
    violation, idle, balance = _EXPERT_METRICS[role]
    return {violation.value: load.max_violation, idle.value: load.idle, balance.value: balance_loss}


def targets_in(batch: PackedBatch) -> Tensor:
    """Return [T] bool, the tokens with a critic target: the field value_mask if present, else all sampled ones."""
    return batch["value_mask"] if "value_mask" in batch else batch["response_mask"]


def least_explained_variance(totals: Totals, batch: PackedBatch) -> float:
    """Return the least explained variance of the returns among the critics, before the updates; NaN if one's returns are all
    equal."""
    found = [_explained_variance(totals, fields) for fields in critics_in(batch).values()]
    return min(found, key=lambda one: (not math.isnan(one), one))


def critic_metrics(totals: Totals, batch: PackedBatch, updates: Mapping[str, UpdateSummary]) -> dict[str, float]:
    """Return the metrics of every critic; empty without one. totals: with `moments_of_tokens`."""
    found: dict[str, float] = {}
    for role, fields in critics_in(batch).items():
        found |= {of_critic(name, role): value for name, value in _of_one(totals, fields, updates[role]).items()}
    return found


def _explained_variance(totals: Totals, fields: CriticFields) -> float:
    return explained_variance(totals[fields.returns], totals[f"error {fields.value}"])


def _of_one(totals: Totals, fields: CriticFields, c: UpdateSummary) -> dict[str, float]:
    """Return one critic's metrics under the names of the first critic."""
    metrics = {
        Metric.CRITIC_LOSS.value: c.loss("loss_sum"),
        Metric.CRITIC_EXPLAINED_VARIANCE.value: _explained_variance(totals, fields),
        Metric.CRITIC_VALUE_ERROR_MAX.value: c.maxima.get("value_error_max", 0.0),
        Metric.CRITIC_GRAD_NORM.value: c.grad_norm,
        Metric.CRITIC_SKIPPED.value: c.skipped,
        Metric.CRITIC_UPDATES.value: c.num_updates,
        **totals.figures(fields.value, "critic/value"),
        **totals.figures(fields.returns, "critic/return"),
    }
    for key, metric in (("value_clip_sum", Metric.CRITIC_VALUE_CLIP), ("return_outside_sum", Metric.CRITIC_RETURN_OUTSIDE)):
        if key in c.sums:
            metrics[metric.value] = c.per_token(key)
    if c.lr is not None:
        metrics[Metric.CRITIC_LR.value] = c.lr
    return metrics | expert_metrics("critic", c.expert_tokens, c.balance_loss)
