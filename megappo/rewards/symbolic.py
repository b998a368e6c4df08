"""Rule `math_verify`: mathematical equality of the response's final answer and the reference answer (math-verify, sympy).
sympy evaluates anything that a policy writes, and `9^{9^{9^9}}` never ends. math-verify's own limits (SIGALRM) cannot interrupt
C code, so one worker process (`symbolic_worker.py`) compares, and the kernel ends it if a comparison takes too much CPU time."""

from __future__ import annotations

import importlib.util
import logging
import signal
import threading
from collections.abc import Mapping, Sequence
from functools import partial

from megappo.rewards.base import NoVerdict, RewardInput, UnusableAnswer
from megappo.rewards.gsm8k import gold_number
from megappo.rewards.math_forms import final_answer
from megappo.runtime.helper_process import Answerer, HelperDied, HelperProcess, parent_to_follow
from megappo.runtime.user_code import DIED

logger = logging.getLogger(__name__)


class MathVerify:
    """1 if the final answer equals the reference answer, else 0; None (undecided) after more than `cpu_limit_s` CPU seconds.

    The final answer is the last \\boxed{} or <answer> that is not empty, else the rest of the line after the last `####` that a
    number follows (GSM8K), else the one that math-verify finds: "the answer is", LaTeX, the last expression. The reference answer
    is the text after its last `####`, or all of it. Undecided comparisons are logged as warnings and counted in `undecided`. Raises
    UnusableAnswer for a reference answer that is no mathematical expression, NoVerdict if the worker died of anything but its
    limit. Threads may share a rule; their calls run one at a time.
    """

    also = ("math_forms.py", "symbolic_worker.py")
    """Files beside this one that decide a score, for the hash of the rule's code."""

    def __init__(self, cpu_limit_s: float = 5.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("reward.parts: math_verify needs the math-verify package: pip install math-verify[antlr4_13_2]")
        self.cpu_limit_s = cpu_limit_s
        self.undecided = 0
        self._lock = threading.Lock()
        self._worker = HelperProcess("math_verify", partial(_comparing, cpu_limit_s), follow=parent_to_follow)

    def __call__(self, sample: RewardInput) -> float | None:
        with self._lock:
            try:
                reply = self._ask({"answer": _reference(sample.answer), "response": final_answer(sample.response)})
            except RuntimeError as died:
                logger.warning("%s; no verdict on %s", died, sample.sample_id)
                raise NoVerdict(DIED) from died
            if reply is None:
                self.undecided += 1
                logger.warning(
                    "math_verify: no verdict on %s within %g s (%d so far)", sample.sample_id, self.cpu_limit_s, self.undecided
                )
                return None
        _require_usable(reply, sample.answer)
        return float(reply["equal"])

    def check_answer(self, answer: str) -> None:
        """Raise UnusableAnswer if this answer is no mathematical expression, or takes over `cpu_limit_s` seconds to read."""
        if _number(answer) is not None:
            return  # most answers of most data: no reason to ask the worker (4 ms)
        with self._lock:
            reply = self._ask({"answer": _reference(answer)})
        if reply is None:
            raise UnusableAnswer(f"the reference answer {answer[-80:]!r} takes more than {self.cpu_limit_s:g} s to read")
        _require_usable(reply, answer)

    def classes(self, responses: Sequence[str]) -> list[int | None] | None:
        """Number the different final answers of these responses: equal numbers for answers that the rule holds equal.
        None for a response without an answer; None in place of the list if the comparisons take more than `cpu_limit_s` seconds."""
        with self._lock:
            reply = self._ask({"responses": [final_answer(response) for response in responses]})
        return None if reply is None else reply["classes"]

    def close(self) -> None:
        """End the worker; the next call starts another."""
        with self._lock:
            self._worker.close()

    def _ask(self, question: Mapping[str, str | list[str]]) -> dict | None:
        try:
            return self._worker(question)[1]
        except HelperDied as died:
            if died.code == -signal.SIGPROF:  # the worker's CPU timer
                return None
            raise RuntimeError(f"the math_verify worker {died}; its message is on the standard error of this rank") from None


def _comparing(cpu_limit_s: float) -> Answerer:
    from megappo.rewards.symbolic_worker import answering  # with math-verify, in the process alone

    return answering(cpu_limit_s)


def _require_usable(reply: dict, answer: str) -> None:
    if not reply["usable"]:
        raise UnusableAnswer(f"the reference answer {answer[-80:]!r} is no mathematical expression")


def _reference(answer: str) -> str:
    number = _number(answer)
    # math-verify reads numbers with money signs, commas or a full stop as text.
    return answer.rsplit("####", 1)[-1].strip() if number is None else number


def _number(answer: str) -> str | None:
    try:
        return f"{gold_number(answer):f}"  # never 1E-7
    except UnusableAnswer:
        return None
