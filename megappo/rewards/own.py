"""Reward code of the user: a function of a Python file, or an entry point of the group `megappo.rewards` (`own_code.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megappo.own_code import OwnFunction, Use, function_of_entry_point, function_of_file
from megappo.rewards.inline import InlinePart

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


def load_from_file(
    name: str, path: str, function: str, *, batch: bool, args: Mapping[str, Any], source: bytes | None = None
) -> OwnRule:
    """Rule of a function of a file. Errors as `function_of_file`; ValueError too for `requires` that is no tuple of names."""
    return _rule(name, function_of_file(path, function, _use(batch), args, source), batch)


def load_from_entry_point(name: str, entry_point: str, *, batch: bool, args: Mapping[str, Any]) -> OwnRule:
    """Rule of a function that an installed package offers. ValueError, one line, as `load_from_file`."""
    return _rule(name, function_of_entry_point(GROUP, entry_point, _use(batch), args), batch)


def _use(batch: bool) -> Use:
    return Use("a list of samples" if batch else "one sample", "a rule returns its score")


def _rule(name: str, found: OwnFunction, batch: bool) -> OwnRule:
    requires = getattr(found.call.func, "requires", ())
    if not isinstance(requires, (tuple, list)) or not all(isinstance(field, str) for field in requires):
        raise ValueError(f"{found.origin}.requires is {requires!r}, not a tuple of names")
    return OwnRule(found.call, found.origin, found.file, found.source, name, batch, tuple(requires))
