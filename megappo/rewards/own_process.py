"""Reward code of the user in a process of its own: several at once, and one that takes too long can be ended."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from megappo.rewards.base import RewardError, RewardInput, UnusableAnswer, describe
from megappo.rewards.own import OwnRule, load_rule
from megappo.runtime.helper_process import FAILED, Answerer, HelperDied, HelperProcess
from megappo.runtime.own_code import OwnCode

_SCORED, _UNUSABLE = "scored", "unusable"

logger = logging.getLogger(__name__)


class OwnProcess:
    """Worker of a pool. timeout_s: wall-clock limit of one call; after it the process is ended and the sample is undecided (None).

    RewardError: the function raised, or its process died. The process ends with the thread that calls, and with this object.
    """

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
        """End the process, also while it works for another thread."""
        self._process.close()


def _scoring(name: str, code: OwnCode) -> Answerer:
    """The rule, as its process answers. ValueError, one line, for code that cannot be used."""
    return partial(_answer, load_rule(name, code, batch=False))


def _answer(rule: OwnRule, sample: RewardInput) -> tuple[str, Any]:
    try:
        return _SCORED, rule.call(sample)
    except UnusableAnswer as error:
        return _UNUSABLE, str(error)
    except (Exception, SystemExit) as error:  # the rank names the sample, and stops the run
        return FAILED, f"raised {type(error).__name__}: {error}{rule.place(error)}"
