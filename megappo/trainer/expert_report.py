"""Experts of a role in the report of a step."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from megappo.algo.summaries import expert_load
from megappo.telemetry.metrics import Metric

_EXPERT_METRICS = {
    "policy": (Metric.POLICY_EXPERT_VIOLATION, Metric.POLICY_EXPERTS_IDLE, Metric.POLICY_BALANCE_LOSS),
    "critic": (Metric.CRITIC_EXPERT_VIOLATION, Metric.CRITIC_EXPERTS_IDLE, Metric.CRITIC_BALANCE_LOSS),
    "sft": (Metric.SFT_EXPERT_VIOLATION, Metric.SFT_EXPERTS_IDLE, Metric.SFT_BALANCE_LOSS),
}


def expert_metrics(role: Literal["policy", "critic", "sft"], tokens: Tensor | None, balance_loss: float) -> dict[str, float]:
    """Metrics of the experts; empty for a dense model. tokens: [layers, experts] sent to each expert, None for a dense model."""
    if tokens is None:
        return {}
    load = expert_load(tokens)
    violation, idle, balance = _EXPERT_METRICS[role]
    return {violation.value: load.max_violation, idle.value: load.idle, balance.value: balance_loss}
