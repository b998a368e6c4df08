"""Metrics of the critics in the report of a step, and of the experts of any role."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from megappo.algo.summaries import expert_load, explained_variance
from megappo.data.packing import PackedBatch
from megappo.telemetry.metrics import Metric, of_critic
from megappo.trainer.critics import CriticFields, critics_in
from megappo.trainer.step_totals import Totals
from megappo.trainer.updates import UpdateSummary

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
        **{f"critic/value_{key}": value for key, value in totals.summary(fields.value)._asdict().items()},
        **{f"critic/return_{key}": value for key, value in totals.summary(fields.returns)._asdict().items()},
    }
    for key, metric in (("value_clip_sum", Metric.CRITIC_VALUE_CLIP), ("return_outside_sum", Metric.CRITIC_RETURN_OUTSIDE)):
        if key in c.sums:
            metrics[metric.value] = c.per_token(key)
    if c.lr is not None:
        metrics[Metric.CRITIC_LR.value] = c.lr
    return metrics | expert_metrics("critic", c.expert_tokens, c.balance_loss)
