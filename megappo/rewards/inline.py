"""Rules that run in the main thread of the rank: quick functions, for which a worker would cost more than the call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from megappo.rewards.base import NoVerdict, RewardError, RewardInput, describe
from megappo.rewards.verdict import plain
from megappo.runtime.worker_pool import Timed

Place = Callable[[BaseException], str]
"""Place in the rule's source where an error occurred, as ` (mine.py:12)`; empty if unknown."""


class Deferred(Future):
    """Future of a call that waits for the main thread: `run` makes it, and so does asking for the result."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._call = call

    def run(self) -> None:
        if self.done() or not self.set_running_or_notify_cancel():
            return
        start = time.perf_counter()
        try:
            result = self._call()
        except (Exception, SystemExit) as error:  # whoever asks for the result raises it
            self.set_exception(error)
        else:
            self.set_result(Timed(result, time.perf_counter() - start))

    def result(self, timeout: float | None = None) -> Any:
        self.run()
        return super().result(timeout)


class InlinePart:
    """A function as a part. batch: it takes all samples that `start` gets, in a list. close: releases what the function holds."""

    # It may draw from the rank's random state, in the order of the samples, or want all of them in one list.
    streams = False

    def __init__(
        self, name: str, function: Callable[[Any], Any], *, batch: bool = False, place: Place | None = None, close: Any = None
    ) -> None:
        self._name, self._function, self._batch = name, function, batch
        self._place, self._close = place or (lambda error: ""), close

    def start(self, samples: Sequence[RewardInput]) -> list[Deferred]:
        if not self._batch:
            return [Deferred(lambda sample=sample: self._one(sample)) for sample in samples]
        results: list[Any] = []

        def result_of(index: int) -> Any:
            if not results:  # the first sample is charged with the time of the whole call
                results.extend(self._all(list(samples)))
            return results[index]

        return [Deferred(lambda index=index: result_of(index)) for index in range(len(samples))]

    def close(self) -> None:
        if self._close is not None:
            self._close()

    def _one(self, sample: RewardInput) -> Any:
        try:
            return self._function(sample)
        except NoVerdict:
            raise
        except (Exception, SystemExit) as error:  # any fault of a rule: named here, then it stops the run
            raise RewardError(f"{self._raised(error)}; {describe(sample)}") from error

    def _all(self, samples: list[RewardInput]) -> Sequence[Any]:
        of_samples = f"{len(samples)} samples, the first: {describe(samples[0])}"
        try:
            results = plain(self._function(samples))
        except (Exception, SystemExit) as error:
            raise RewardError(f"{self._raised(error)}; {of_samples}") from error
        if not isinstance(results, (list, tuple)) or len(results) != len(samples):
            got = f"{len(results)} results" if isinstance(results, (list, tuple)) else f"{type(results).__name__}, no list,"
            raise RewardError(f"reward rule {self._name} returned {got} for {of_samples}")
        return results

    def _raised(self, error: BaseException) -> str:
        return f"reward rule {self._name} raised {type(error).__name__}: {error}{self._place(error)}"
