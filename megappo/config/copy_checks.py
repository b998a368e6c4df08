"""Rules about copies of the policy: its moving average, and a reference that is refreshed. Imports no torch.

Keys without effect: `dead_keys.py`.
"""

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


def refresh_problem(config: TrainConfig) -> str | None:
    """A reference that no weights of the policy fit, or an average that is copied and not kept. Its engine, layout and ranks may
    be others."""
    reference, policy = config.reference, config.policy
    if not reference.refreshes or config.algorithm.kl.placement == "none":
        return None
    by_steps = reference.refresh_every > 0
    name = "refresh_every" if by_steps else "refresh_above_kl"
    key, value = f"reference.{name}", getattr(reference, name)
    if policy.lora is not None:
        return problem(
            key, value, "policy.lora trains adapters beside a frozen model, which is the reference; remove one of the two"
        )
    if reference.model not in (None, policy.model):
        return problem(key, value, "reference.model is another model than the policy's; leave reference.model out")
    if reference.refresh_from == "ema" and policy.ema is None:
        return problem("reference.refresh_from", "ema", "policy.ema is not set, so there is no average; set policy.ema.decay")
    return None
