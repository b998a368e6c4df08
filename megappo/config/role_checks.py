"""Rules about what a role trains: frozen weights, the critic's loss and its categorical head. See `checks.py`."""

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
