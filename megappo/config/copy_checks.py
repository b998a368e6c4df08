"""Rules about copies of the policy: its moving average. Keys without effect: `dead_keys.py`. Imports no torch."""

from __future__ import annotations

from megappo.config.errors import problem
from megappo.config.schema import TrainConfig


def average_problem(config: TrainConfig) -> str | None:
    """An average of adapters, and one that is used and not kept."""
    if config.policy.ema is not None and config.policy.lora is not None:
        fix = "policy.lora trains adapters, and only whole weights are averaged; remove one of the two"
        return problem("policy.ema.decay", config.policy.ema.decay, fix)
    if config.trainer.evaluate_with == "ema" and config.policy.ema is None:
        return problem("trainer.evaluate_with", "ema", "policy.ema is not set, so there is no average; set policy.ema.decay")
    return None
