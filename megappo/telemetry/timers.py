"""Wall time and memory of the named stages of one step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

import torch

from megappo.telemetry.tables import GIB

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): the peak resident set becomes the current one


class MemoryGauge:
    """Gauge of one kind of memory, in GiB. kind: its name in texts. suffix: end of the metrics' names. highest: the most seen since
    the process began."""

    kind: str
    suffix = "peak_gib"

    def __init__(self) -> None:
        self.highest = host_peak_gib()

    def begin(self) -> None:
        """Note the peak of the work between two stages, and begin a new one."""
        self.end()
        self._reset()

    def end(self) -> float:
        """Return the peak of the stage that ends."""
        peak = self._peak()
        self.highest = max(self.highest, peak)
        return peak

    def _peak(self) -> float:
        return host_peak_gib()

    def _reset(self) -> None: ...


class DevicePeak(MemoryGauge):
    """Peak memory that torch has allocated on a GPU, without NCCL's and the CUDA context."""

    kind = "peak memory that torch allocated on the GPU"

    def __init__(self, device: torch.device) -> None:
        self._device, self.highest = device, 0.0

    def _peak(self) -> float:
        return torch.cuda.max_memory_allocated(self._device) / GIB

    def _reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class HostPeak(MemoryGauge):
    """Peak resident memory of this process (VmHWM), which Linux resets on demand; the reset lowers `ru_maxrss` too."""

    kind = "peak resident memory of the process"

    def _reset(self) -> None:
        _CLEAR.write_text(_RESET_PEAK, encoding="utf-8")


class HostResident(MemoryGauge):
    """Resident memory of this process at a stage's end, where its peak cannot be reset (some containers)."""

    kind, suffix = "resident memory of the process at the stage's end, because its peak cannot be reset here", "end_gib"

    def end(self) -> float:
        super().end()
        return _status("VmRSS")


def memory_gauge(device: torch.device) -> MemoryGauge:
    """Return the gauge of a rank that computes on `device`."""
    if device.type == "cuda":
        return DevicePeak(device)
    try:
        _CLEAR.write_text(_RESET_PEAK, encoding="utf-8")
    except OSError:  # no such file (gVisor, a kernel without it), or not permitted
        return HostResident()
    return HostPeak()


def host_peak_gib() -> float:
    """Return the peak resident memory of this process in GiB, since its start or a gauge's reset."""
    return _status("VmHWM")


def _status(field: str) -> float:
    text = _STATUS.read_text(encoding="utf-8")
    start = text.index(field) + len(field) + 1
    return int(text[start : text.index("kB", start)]) * 1024 / GIB


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
