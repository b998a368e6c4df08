"""Time and memory of a call on the CPU or a GPU, with cold caches, and the copy that floors are counted in.

CPU time is the wall clock: calls take from tens of microseconds to seconds and run one at a time, and the timers of
torch.utils.benchmark can neither empty a cache between repetitions nor interleave candidates. GPU time is between CUDA events,
with the flush queued before the first of them, so that the host is ahead of the device and its head start is charged to no call.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.model import Timing

# parameters of glibc's mallopt
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_NEVER = 2**31 - 1


def last_level_cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    for size in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"), reverse=True):
        return int(size.read_text().strip().rstrip("K")) * 1024
    return 64 * 2**20


# Writing 1 GiB takes a GPU half a millisecond at least, in which the host queues the calls that are timed.
LEAST_FLUSH_BYTES = {"cpu": 0, "cuda": 2**30}


class Clock:
    """Timer of calls on one device; `flush` empties its last cache by writing twice its size or more."""

    def __init__(self, device: torch.device, copy_bytes: int) -> None:
        self.device = device
        flushed = max(2 * last_level_cache_bytes(device), LEAST_FLUSH_BYTES[device.type])
        self._flushed = torch.zeros(flushed // 4, dtype=torch.int32, device=device)
        self._source = torch.ones(copy_bytes // 4, device=device)
        self._copy = torch.empty_like(self._source)

    def flush(self) -> None:
        self._flushed.add_(1)

    def copy(self) -> None:
        """The probe of the bandwidth: moves `copy_moves` bytes, half of them reads."""
        self._copy.copy_(self._source)

    @property
    def copy_moves(self) -> int:
        return 2 * self._source.nbytes

    def laps(self, calls: Sequence[Callable[[Any], Any]]) -> tuple[list[float], Any]:
        """(seconds of each of the calls, each given what the one before returned; what the last returned)."""
        self.flush()
        value: Any = None
        if self.device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
            events[0].record()
            for call, event in zip(calls, events[1:]):
                value = call(value)
                event.record()
            torch.cuda.synchronize(self.device)
            return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:])], value
        marks = [time.perf_counter()]
        for call in calls:
            value = call(value)
            marks.append(time.perf_counter())
        return [b - a for a, b in zip(marks, marks[1:])], value


def summary(seconds: Sequence[float], scale: float = 1.0, *, show_best: bool = False) -> Timing:
    ordered = sorted(s * scale for s in seconds)
    first, _, third = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else (ordered[0],) * 3
    median = statistics.median(ordered)
    return Timing(ordered[0] if show_best else median, median, third - first, ordered[0], len(ordered))


class Memory:
    """Peak memory of a call. On a GPU what torch's allocator held at most. On the CPU the peak of the resident set, which Linux
    can reset: it counts every allocation that was touched, inside compiled kernels too."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._clear = Path("/proc/self/clear_refs")

    @property
    def method(self) -> str | None:
        """Method of measurement; None if there is none here."""
        if self.device.type == "cuda":
            return "torch.cuda.max_memory_allocated"
        return "peak resident set (VmHWM after clear_refs)" if self._clear.exists() else None

    def peak(self, call: Callable[[], Any]) -> tuple[int, Any] | None:
        """(bytes above what was held before, what the call returned)."""
        if self.method is None:
            return None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            value = call()
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) - before, value
        _libc_call("malloc_trim", 0)
        self._clear.write_text("5")
        before = _status_bytes("VmRSS")
        value = call()
        return max(_status_bytes("VmHWM") - before, 0), value


# What glibc's malloc does with freed memory. "usual" is where its own rules lead a process that frees large tensors: blocks from
# 32 MiB on are mapped and returned one by one. "kept" is what torch's allocator for CUDA does; without it every candidate is
# charged the page faults of all that it allocates, which on a virtual machine take several times as long as the arithmetic.
# "returned" at once makes the resident set follow what is alive; it has to come before "kept", whose freed blocks malloc would
# hand out again.
FREED_MEMORY = {
    "usual": {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 64 * 2**20},
    "kept": {_MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER},
    "returned": {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 64 * 2**10, _TRIM_THRESHOLD: 64 * 2**10},
}


def set_freed_memory(mode: str) -> bool:
    """Set how the C library treats freed memory; False if this one does not take the setting."""
    return all([_libc_call("mallopt", *setting) == 1 for setting in FREED_MEMORY[mode].items()])  # noqa: C419  every call is made


def _libc_call(name: str, *args: int) -> int | None:
    function = getattr(ctypes.CDLL(None), name, None)
    return None if function is None else function(*args)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
