"""A pool of workers: one thread each, which waits for a process of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

JOIN_S = 10.0  # for a worker that ends


class Worker(Protocol):
    """Answers one question at a time. Called in one thread, made in another."""

    def __call__(self, question: Any, /) -> Any:
        """Return the answer. An exception becomes that of the question's future."""
        ...

    def close(self) -> None:
        """End it; callable from any thread, also during a call."""
        ...


@dataclass(frozen=True)
class Timed:
    """An answer and the seconds it took, without the wait for a free worker."""

    result: Any
    seconds: float


class WorkerPool:
    """Workers behind one queue; the first question starts their threads. name: of the threads."""

    def __init__(self, name: str, make: Callable[[], Worker], workers: int) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Future[Timed], Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._workers = [make() for _ in range(workers)]

    def submit(self, question: Any) -> Future[Timed]:
        """Return the future of the answer. Its exception is what the worker raised; a question that still waits can be
        cancelled."""
        assert self._workers, "the pool was closed"
        future: Future[Timed] = Future()
        self._queue.put((future, question))
        for worker in () if self._threads else self._workers:
            # A daemon: a worker that never answers must not hold the end of a rank that has failed.
            thread = threading.Thread(target=self._serve, args=(worker,), name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def close(self) -> None:
        """End all workers, also those with a question in hand. May be called twice."""
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
            future, question = item
            if not future.set_running_or_notify_cancel():
                continue
            start = time.perf_counter()
            try:
                result = worker(question)
            except (Exception, SystemExit) as error:  # whoever asks for the answer raises it
                future.set_exception(error)
            else:
                future.set_result(Timed(result, time.perf_counter() - start))
