"""Loads reward code of the user."""

from __future__ import annotations

from functools import partial

from megappo.config.reward_sections import RewardPart
from megappo.rewards.base import PreparedPart
from megappo.rewards.pool import PoolPart
from megappo.rewards.user import GROUP, OwnProcess, load_rule
from megappo.runtime.user_code import OwnCode


def load_own(part: RewardPart) -> PreparedPart:
    """Load the code of a part with a path or an entry point. ValueError, one line, for code that cannot be used."""
    code = OwnCode(GROUP, part.path, part.function, part.entry_point, part.args)
    rule = load_rule(part.label, code, batch=part.batch)
    if not part.workers:
        return PreparedPart(rule.part, rule.requires, rule.sha256)
    make = partial(PoolPart, part.label, partial(OwnProcess, part.label, code.as_read(rule), part.timeout_s), part.workers)
    return PreparedPart(make, rule.requires, rule.sha256)
