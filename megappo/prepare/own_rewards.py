"""Reward code of the user, as a part of the configuration names it."""

from __future__ import annotations

from functools import partial

from megappo.config.reward_sections import RewardPart
from megappo.rewards.base import PreparedPart
from megappo.rewards.own import load_from_entry_point, load_from_file
from megappo.rewards.own_process import OwnCode, OwnProcess
from megappo.rewards.pool import PoolPart


def load_own(part: RewardPart) -> PreparedPart:
    """Load the code of a part with a path or an entry point. ValueError, one line, for code that cannot be used."""
    how = {"batch": part.batch, "args": part.args}
    if part.path is not None:
        rule = load_from_file(part.label, part.path, str(part.function), **how)
    else:
        rule = load_from_entry_point(part.label, str(part.entry_point), **how)
    if not part.workers:
        return PreparedPart(rule.part, rule.requires, rule.sha256)
    code = OwnCode(part.label, part.path, part.function, rule.source, part.entry_point, part.args)
    make = partial(PoolPart, part.label, partial(OwnProcess, code, part.timeout_s), part.workers)
    return PreparedPart(make, rule.requires, rule.sha256)
