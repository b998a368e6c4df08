"""Memory that a stage of a step needs on this rank: its peak, reset when the stage begins, where the machine can."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from megappo.telemetry.tables import GIB

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): the peak resident set becomes the current one


class MemoryGauge(Protocol):
    """Gauge of one kind of memory. highest: largest GiB seen since the process began."""

    kind: str
    """Name of that memory in texts."""
    suffix: str
    """End of the metrics' names."""
    highest: float

    def begin(self) -> None: ...

    def end(self) -> float:
        """Return the GiB of the stage that ends."""
        ...


class DevicePeak:
    """Peak memory that torch has allocated on a GPU, without NCCL's and the CUDA context."""

    kind, suffix = "peak memory that torch allocated on the GPU", "peak_gib"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.highest = 0.0

    def begin(self) -> None:
        self.end()  # work between two stages
        torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> float:
        peak = torch.cuda.max_memory_allocated(self._device) / GIB
        self.highest = max(self.highest, peak)
        return peak


class HostPeak:
    """Peak resident memory of this process (VmHWM), which Linux resets on demand; the reset lowers `ru_maxrss` too."""

    kind, suffix = "peak resident memory of the process", "peak_gib"

    def __init__(self) -> None:
        self.highest = host_peak_gib()

    def begin(self) -> None:
        self.end()
        _CLEAR.write_text(_RESET_PEAK, encoding="utf-8")

    def end(self) -> float:
        peak = host_peak_gib()
        self.highest = max(self.highest, peak)
        return peak


class HostResident:
    """Resident memory of this process at a stage's end, where its peak cannot be reset (some containers)."""

    kind, suffix = "resident memory of the process at the stage's end, because its peak cannot be reset here", "end_gib"

    def __init__(self) -> None:
        self.highest = host_peak_gib()

    def begin(self) -> None:
        """Do nothing: nothing can be reset."""

    def end(self) -> float:
        self.highest = max(self.highest, host_peak_gib())
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
