"""Reward code of the user: a function of a Python file, or an entry point of the group `megappo.rewards` (`user_code.py`).
It runs in the rank, or in several processes of its own, which can be ended if they take too long."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from megappo.rewards.base import RewardError, RewardInput, UnusableAnswer, describe
from megappo.rewards.inline import InlinePart
from megappo.runtime.helper_process import FAILED, Answerer, HelperDied, HelperProcess
from megappo.runtime.user_code import OwnCode, OwnFunction, Use

GROUP = "megappo.rewards"
_SCORED, _UNUSABLE = "scored", "unusable"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnRule(OwnFunction):
    """Loaded reward code. `call` takes a `RewardInput`, or a list of them if `batch`."""

    name: str
    batch: bool
    requires: tuple[str, ...]
    """`answer`, and fields that every record must have."""

    def part(self) -> InlinePart:
        return InlinePart(self.name, self.call, batch=self.batch, place=self.place)


def load_rule(name: str, code: OwnCode, *, batch: bool) -> OwnRule:
    """Load the rule of the user's code. Errors as `OwnCode.load`; ValueError too for `requires` that is no tuple of names."""
    found = code.load(Use("a list of samples" if batch else "one sample", "a rule returns its score"))
    requires = getattr(found.call.func, "requires", ())
    if not isinstance(requires, (tuple, list)) or not all(isinstance(field, str) for field in requires):
        raise ValueError(f"{found.origin}.requires is {requires!r}, not a tuple of names")
    return OwnRule(found.call, found.origin, found.file, found.source, name, batch, tuple(requires))


class OwnProcess:
    """Worker of a pool that runs one rule in a process; the process ends with the calling thread and with this object.
    timeout_s: wall-clock limit of one call; after it the process is ended and the sample is undecided (None). Raises RewardError
    if the function raised or its process died."""

    def __init__(self, name: str, code: OwnCode, timeout_s: float | None) -> None:
        self._name, self._timeout_s, self._undecided = name, timeout_s, 0
        self._process = HelperProcess(f"reward {name}", partial(_scoring, name, code), timeout_s)

    def __call__(self, sample: RewardInput) -> Any:
        try:
            word, value = self._process(sample)
        except TimeoutError:
            self._undecided += 1
            text = "%s: no result for %s within %g s, scored 0 (%d so far in this worker)"
            logger.warning(text, self._name, sample.sample_id, self._timeout_s, self._undecided)
            return None
        except HelperDied as died:
            raise RewardError(f"the worker of reward rule {self._name} {died}; {describe(sample)}") from None
        if word == _UNUSABLE:
            raise UnusableAnswer(value)
        if word != _SCORED:
            raise RewardError(f"reward rule {self._name} {value}; {describe(sample)}")
        return value

    def close(self) -> None:
        """End the process, even while it works for another thread."""
        self._process.close()


def _scoring(name: str, code: OwnCode) -> Answerer:
    return partial(_answer, load_rule(name, code, batch=False))


def _answer(rule: OwnRule, sample: RewardInput) -> tuple[str, Any]:
    try:
        return _SCORED, rule.call(sample)
    except UnusableAnswer as error:
        return _UNUSABLE, str(error)
    except (Exception, SystemExit) as error:  # the rank names the sample, and stops the run
        return FAILED, f"raised {type(error).__name__}: {error}{rule.place(error)}"
