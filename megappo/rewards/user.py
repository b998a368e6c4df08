"""Reward code of the user: a function of a Python file, or an entry point of the group `megappo.rewards` (`user_code.py`).
It runs in the rank, or in several processes of its own, which can be ended if they take too long."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from megappo.rewards.base import NoVerdict, RewardError, RewardInput, describe
from megappo.rewards.inline import InlinePart
from megappo.runtime.helper_process import Answerer, HelperDied, HelperProcess
from megappo.runtime.user_code import ANSWERED, DIED, NO_VERDICT, OwnCode, OwnFunction, Use, answer_of

GROUP = "megappo.rewards"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnRule(OwnFunction):
    """Loaded reward code. `call` takes a `RewardInput`, or a list of them if `batch`."""

    name: str
    batch: bool
    requires: tuple[str, ...]
    """`answer`, and fields that every record must have."""

    @property
    def reads_answer(self) -> bool:
        return "answer" in self.requires or self.reads("answer")

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
    timeout_s: wall-clock limit of one call; after it the process is ended and the sample is undecided (None). Raises NoVerdict if
    the function did or its process died, RewardError if the function raised anything else."""

    def __init__(self, name: str, code: OwnCode, timeout_s: float | None) -> None:
        self._name, self._timeout_s, self._without = name, timeout_s, 0
        self._process = HelperProcess(f"reward {name}", partial(_scoring, name, code), timeout_s)

    def __call__(self, sample: RewardInput) -> Any:
        try:
            word, value = self._process(sample)
        except TimeoutError:
            self._warn(f"gave no result within {self._timeout_s:g} s", sample)
            return None
        except HelperDied as died:
            self._warn(f"lost its process, which {died}", sample)
            raise NoVerdict(DIED) from None
        if word == NO_VERDICT:
            raise NoVerdict(value)
        if word != ANSWERED:
            raise RewardError(f"reward rule {self._name} {value}; {describe(sample)}")
        return value

    def _warn(self, what: str, sample: RewardInput) -> None:
        self._without += 1
        text = "reward rule %s %s: no verdict on %s (%d so far in this worker)"
        logger.warning(text, self._name, what, describe(sample), self._without)

    def close(self) -> None:
        """End the process, even while it works for another thread."""
        self._process.close()


def _scoring(name: str, code: OwnCode) -> Answerer:
    return partial(answer_of, load_rule(name, code, batch=False))
