"""Rules about one role: frozen weights, the critic's categorical head, copies of the policy (its moving average, a reference that
is refreshed). Imports no torch. See `checks.py`; keys without effect: `dead_keys.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.errors import problem
from megappo.config.layout_checks import trained_sections
from megappo.config.schema import SftConfig, TrainConfig


def freeze_problems(config: TrainConfig | SftConfig) -> Iterator[str]:
    """Frozen weights under adapters, whose base is frozen as a whole. Patterns that fit no weight: `prepare/layouts.py`."""
    for role, section in trained_sections(config).items():
        if section.freeze and section.lora is not None:
            fix = f"{role}.lora freezes the whole model already; remove one of the two"
            yield problem(f"{role}.freeze", list(section.freeze), fix)


def value_bins_problem(config: TrainConfig) -> str | None:
    """A categorical head without a range, or with none that is one."""
    for role, critic in config.critics.items():
        if not critic.is_categorical:
            continue
        for key, end in (("value_low", critic.value_low), ("value_high", critic.value_high)):
            if end is None:
                both = f"set {role}.value_low and {role}.value_high"
                fix = f"the bins of {role}.loss {critic.loss} need both ends of the returns; {both}"
                return problem(f"{role}.{key}", end, fix)
        assert critic.value_low is not None and critic.value_high is not None
        if critic.value_low >= critic.value_high:
            fix = f"is not below {role}.value_high {critic.value_high:g}; exchange them"
            return problem(f"{role}.value_low", critic.value_low, fix)
    return None


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
