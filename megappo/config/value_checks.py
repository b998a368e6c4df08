"""Rules about the critic's loss and its categorical head, see `checks.py`."""

from __future__ import annotations

import math

from megappo.config.errors import problem
from megappo.config.schema import TrainConfig


def value_bins_problem(config: TrainConfig) -> str | None:
    """A categorical head without a range, or with none that is one."""
    critic = config.critic
    if not critic.is_categorical:
        return None
    for key, end in (("value_low", critic.value_low), ("value_high", critic.value_high)):
        if end is None or not math.isfinite(end):
            fix = f"the bins of critic.loss {critic.loss} need both ends of the returns; set critic.value_low and critic.value_high"
            return problem(f"critic.{key}", end, fix)
    assert critic.value_low is not None and critic.value_high is not None
    if critic.value_low >= critic.value_high:
        return problem("critic.value_low", critic.value_low, f"is not below critic.value_high {critic.value_high:g}; exchange them")
    return None
