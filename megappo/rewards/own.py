"""Reward code of the user: a function of a Python file, or an entry point of the group `megappo.rewards` (`own_code.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from megappo.rewards.inline import InlinePart
from megappo.runtime.own_code import OwnCode, OwnFunction, Use

GROUP = "megappo.rewards"


@dataclass(frozen=True)
class OwnRule(OwnFunction):
    """Loaded reward code. call: takes a `RewardInput`, or a list of them if `batch`. requires: `answer`, and fields that every
    record must have."""

    name: str
    batch: bool
    requires: tuple[str, ...]

    def part(self) -> InlinePart:
        """The rule as a part of a reward."""
        return InlinePart(self.name, self.call, batch=self.batch, place=self.place)


def load_rule(name: str, code: OwnCode, *, batch: bool) -> OwnRule:
    """Rule of the user's code. Errors as `OwnCode.load`; ValueError too for `requires` that is no tuple of names."""
    found = code.load(Use("a list of samples" if batch else "one sample", "a rule returns its score"))
    requires = getattr(found.call.func, "requires", ())
    if not isinstance(requires, (tuple, list)) or not all(isinstance(field, str) for field in requires):
        raise ValueError(f"{found.origin}.requires is {requires!r}, not a tuple of names")
    return OwnRule(found.call, found.origin, found.file, found.source, name, batch, tuple(requires))
