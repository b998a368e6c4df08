"""Parts that score several samples at once on a rank: a thread for each worker, which waits for a process of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from megappo.rewards.base import RewardInput, Timed

JOIN_S = 10.0  # for a worker that ends


class Worker(Protocol):
    """Scores one sample at a time. Called in one thread, and made in another."""

    def __call__(self, sample: RewardInput) -> Any:
        """A `Result`; raises as a `Part`'s future."""
        ...

    def close(self) -> None:
        """End it; from any thread, also while it is called."""
        ...


class PoolPart:
    """A part whose samples wait in one queue for the next of `workers` workers, whose threads the first samples start."""

    streams = True

    def __init__(self, name: str, make: Callable[[], Worker], workers: int) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Future[Any], RewardInput] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._workers = [make() for _ in range(workers)]

    def start(self, samples: Sequence[RewardInput]) -> list[Future[Any]]:
        assert self._workers, "the pool was closed"
        futures: list[Future[Any]] = []
        for sample in samples:
            futures.append(Future())
            self._queue.put((futures[-1], sample))
        for worker in self._workers if samples and not self._threads else ():
            # A daemon: a worker that never answers must not hold the end of a rank that has failed.
            thread = threading.Thread(target=self._serve, args=(worker,), name=f"reward {self._name}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return futures

    def close(self) -> None:
        while not self._queue.empty():
            if (item := self._queue.get()) is not None:
                item[0].cancel()
        for _ in self._threads:
            self._queue.put(None)
        for worker in self._workers:
            worker.close()
        for thread in self._threads:
            thread.join(JOIN_S)
        self._workers, self._threads = [], []

    def _serve(self, worker: Worker) -> None:
        while (item := self._queue.get()) is not None:
            future, sample = item
            if not future.set_running_or_notify_cancel():
                continue
            start = time.perf_counter()
            try:
                result = worker(sample)
            except (Exception, SystemExit) as error:  # whoever asks for the result raises it
                future.set_exception(error)
            else:
                future.set_result(Timed(result, time.perf_counter() - start))
