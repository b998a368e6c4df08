"""Reward of a program: the share of its record's tests that it passes, each run in a sandbox."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from megappo.rewards.base import NoVerdict, RewardInput, UnusableAnswer
from megappo.rewards.code.response import program_of
from megappo.rewards.code.tests_of_record import CodeTest, read_tests
from megappo.rewards.sandbox.box import Limits, Sandbox, SandboxError
from megappo.runtime.user_code import DIED
from megappo.runtime.worker_pool import Timed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CodeReward:
    """Settings of a code reward: `reward.parts.code` of the configuration."""

    tests_key: str
    entry_point_key: str | None
    setup_key: str | None
    score: Literal["all", "fraction"]
    timeout_s: float
    workers: int
    limits: Limits


class CodePart:
    """Run the program of each sample against the tests of its record, `workers` samples at a time.
    Score: 1 if all tests pass, else 0; or the share that passes. Parts: has_code, passed (share), timeout, error (1 if a test
    ended so). A response without a program scores 0."""

    streams = True

    def __init__(self, settings: CodeReward) -> None:
        self._settings = settings
        self._pool = ThreadPoolExecutor(settings.workers, thread_name_prefix="megappo-code")
        self._lock = threading.Lock()
        self._open: set[Sandbox] = set()
        self._closed = False

    def start(self, samples: Sequence[RewardInput]) -> Sequence[Future[Timed]]:
        """Return one future per sample, in order. It may raise UnusableAnswer for tests that cannot be read, or NoVerdict for a
        sandbox that cannot be started."""
        return [self._pool.submit(self._timed, sample) for sample in samples]

    def close(self) -> None:
        """End all programs and workers; samples without a score are cancelled or fail."""
        with self._lock:
            self._closed = True
            running = list(self._open)
        for sandbox in running:
            sandbox.kill()
        self._pool.shutdown(cancel_futures=True)

    def _timed(self, sample: RewardInput) -> Timed:
        started = time.perf_counter()
        return Timed(self._score(sample), time.perf_counter() - started)

    def _score(self, sample: RewardInput) -> Mapping[str, Any]:
        tests, setup = read_problem(self._settings, sample.record)
        program = program_of(sample.response)
        if program is None:
            return {"score": 0.0, "parts": {"has_code": 0.0, "passed": 0.0, "timeout": 0.0, "error": 0.0}}
        try:
            ended = self._run(tests, {"setup": setup, "source": program})
        except SandboxError as error:  # of the machine, as one without memory for another process
            logger.warning("reward code: no verdict on sample %s: %s", sample.sample_id, error)
            raise NoVerdict(DIED) from error
        passed = ended["passed"] / len(tests)
        score = passed if self._settings.score == "fraction" else float(ended["passed"] == len(tests))
        others = {name: float(ended[name] > 0) for name in ("timeout", "error")}
        return {"score": score, "parts": {"has_code": 1.0, "passed": passed, **others}}

    def _run(self, tests: Sequence[CodeTest], program: Mapping[str, str]) -> Counter[str]:
        """Count tests by end: passed, failed, timeout, error. With score: all, the first that fails is the last."""
        ended: Counter[str] = Counter()
        with Sandbox(self._settings.limits) as sandbox:
            with self._lock:
                if self._closed:
                    return ended
                self._open.add(sandbox)
            try:
                end = time.monotonic() + self._settings.timeout_s
                for test in tests:
                    left = end - time.monotonic()
                    if left <= 0:
                        ended["timeout"] += 1
                        break
                    outcome = sandbox.run(test.stdin, {**test.task, **program}, left)
                    verdict = "passed" if test.passed(outcome) else _END.get(outcome.status, "error")
                    ended[verdict] += 1
                    if outcome.status == "lost":
                        raise NoVerdict(DIED)
                    if verdict != "passed" and self._settings.score == "all":
                        break
            finally:
                with self._lock:
                    self._open.discard(sandbox)
        return ended


# A program that ends well and does not pass has given a wrong answer; every end that is not listed is an error.
_END = {"timeout": "timeout", "exit 0": "failed"}


def read_problem(settings: CodeReward, record: Mapping[str, Any]) -> tuple[tuple[CodeTest, ...], str]:
    """Read a record's tests and the code that comes before a program. Raises UnusableAnswer, one line, if they are unreadable."""
    entry_point = None if settings.entry_point_key is None else field_of(record, settings.entry_point_key)
    setup = "" if settings.setup_key is None else field_of(record, settings.setup_key)
    if entry_point is not None and not (isinstance(entry_point, str) and entry_point.isidentifier()):
        raise UnusableAnswer(f"{settings.entry_point_key} is {entry_point!r}, not the name of a function")
    if isinstance(setup, Sequence) and not isinstance(setup, str):  # MBPP lists imports
        setup = "\n".join(map(str, setup))
    if not isinstance(setup, str):
        raise UnusableAnswer(f"{settings.setup_key} is {type(setup).__name__}, neither code nor a list of lines")
    return read_tests(field_of(record, settings.tests_key), entry_point), setup


def field_of(record: Mapping[str, Any], key: str) -> Any:
    """Field of a record; `a.b` reaches inside. Raises UnusableAnswer if there is none."""
    value: Any = record
    for name in key.split("."):
        if not isinstance(value, Mapping) or value.get(name) is None:
            raise UnusableAnswer(f"the record has no field {key}")
        value = value[name]
    return value
