"""Seconds, processor time and memory of a rank's training steps. Imports neither torch nor megappo: ranks of other trainers use
it."""

from __future__ import annotations

import json
import time
from pathlib import Path


class StepClock:
    """Clock of one rank: `begin` before its first step, `ended` after each one."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []
        self._before_kib = 0

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak so far is of imports and loading
        self._before_kib = _memory_kib("VmRSS")
        self.ended()

    def ended(self) -> None:
        self._marks.append((time.perf_counter(), time.process_time()))

    def write(self, path: Path) -> None:
        """Write {wall_s, processor_s: of each step; before_kib, peak_kib: resident memory} as JSON."""
        wall, processor = ([b - a for a, b in zip(of, of[1:])] for of in zip(*self._marks))
        found = {"wall_s": wall, "processor_s": processor, "before_kib": self._before_kib, "peak_kib": _memory_kib("VmHWM")}
        path.write_text(json.dumps(found), encoding="utf-8")


def _memory_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
