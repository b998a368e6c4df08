"""Wall time and memory of the named stages of one step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from megappo.telemetry.memory import MemoryGauge


def wait_for_device() -> None:
    """Wait for queued work on the GPU, so that a stage's time includes it."""
    if torch.cuda.is_initialized():  # the question itself must not create a CUDA context
        torch.cuda.synchronize()


class StageObserver(Protocol):
    """Gets the name of each stage that this rank enters, as `runtime.sections.Sections` does."""

    def section(self, name: str) -> AbstractContextManager[None]: ...


class StageTimers:
    """Timers of one step. seconds: stage -> wall time; entering a stage again adds to it. spans: stage -> first begin and last end,
    in seconds since construction. memory_gib: stage -> largest value of `memory`. observer: gets every stage."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        observer: StageObserver | None = None,
        memory: MemoryGauge | None = None,
    ) -> None:
        self._clock = clock
        self._observer, self._memory = observer, memory
        self._started = clock()
        self._open: list[str] = []
        self.seconds: dict[str, float] = {}
        self.spans: dict[str, tuple[float, float]] = {}
        self.memory_gib: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body, even if it raises; an error then names stage and rank. Stages do not nest."""
        assert not self._open, f"stage {name} begins inside {self._open[-1]}"  # its time would count twice
        self._open.append(name)
        start = self._clock()
        if self._memory is not None:
            self._memory.begin()
        try:
            with nullcontext() if self._observer is None else self._observer.section(name):
                yield
                wait_for_device()
        except Exception as error:
            # torch.distributed's timeouts name neither.
            error.add_note(f"in stage {name}, on rank {os.environ.get('RANK', '0')}")
            raise
        finally:
            if self._memory is not None:
                self.memory_gib[name] = max(self.memory_gib.get(name, 0.0), self._memory.end())
            self._open.pop()
            end = self._clock()
            self.seconds[name] = self.seconds.get(name, 0.0) + end - start
            begin, _ = self.spans.get(name, (start - self._started, 0.0))
            self.spans[name] = (begin, end - self._started)

    @property
    def total_s(self) -> float:
        """Seconds since construction, including the time between stages."""
        return self._clock() - self._started
