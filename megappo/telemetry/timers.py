"""Wall time of the named stages of one step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def wait_for_device() -> None:
    """Let a stage end when its work is done, not when it is queued. Nothing to do where CUDA was never touched."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class StageTimers:
    """seconds: stage -> wall time; a stage that is entered again adds up. One object serves one step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._open: list[str] = []
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times its body, also when it raises; an error then names stage and rank. Stages do not nest: times would count twice."""
        assert not self._open, f"stage {name} begins inside {self._open[-1]}"
        self._open.append(name)
        start = self._clock()
        try:
            yield
            wait_for_device()
        except Exception as error:
            # A time-out of torch.distributed tells neither.
            error.add_note(f"in stage {name}, on rank {os.environ.get('RANK', '0')}")
            raise
        finally:
            self._open.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - start

    @property
    def total_s(self) -> float:
        """Seconds since this object was made, what lies between the stages included."""
        return self._clock() - self._started
