"""Parts that score several samples at once on a rank, by a pool of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from megappo.rewards.base import RewardInput
from megappo.runtime.worker_pool import Worker, WorkerPool


class PoolPart:
    """A part whose samples wait in one queue for the next of `workers` workers, each of which answers with a `Result`."""

    streams = True

    def __init__(self, name: str, make: Callable[[], Worker], workers: int) -> None:
        self._pool = WorkerPool(f"reward {name}", make, workers)

    def start(self, samples: Sequence[RewardInput]) -> list[Future[Any]]:
        return [self._pool.submit(sample) for sample in samples]

    def close(self) -> None:
        self._pool.close()
