"""The section of work that this rank is in, and the time limit of each section, learned from the run. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megappo.config.run_sections import TimeoutsConfig

# `rank-N.section` in an attempt's folder tells where a killed rank was. A rank writes every section there and removes the file when
# it ends by itself, so unlike the watchdog's signs of life it is never out of date.
_BYTES = 256  # of the file, padded: a shorter section leaves nothing of a longer one


class SectionFile:
    """Writer of a rank's section file, open until `remove`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = _path(folder, rank)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def write(self, section: str, step: int) -> None:
        """Write the present section; takes 2 us. The kernel keeps it even if the process is killed."""
        line = json.dumps({"section": section, "step": step})
        with contextlib.suppress(OSError):  # a full disk ends no section
            os.pwrite(self._descriptor, line.ljust(_BYTES - 1).encode() + b"\n", 0)

    def remove(self) -> None:
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)


def last_section(folder: Path, rank: int) -> str | None:
    """Return `update_policy, step 3` of a rank that did not end by itself; None if it left none, as before the world was built."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        left = json.loads(_path(folder, rank).read_text(encoding="utf-8"))
        return f"{left['section']}, step {left['step']}" if left["step"] else left["section"]
    return None


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.section"


# Occurrences of a section before its limit is learned: the first compile, warm up caches and open connections.
WARM_UP = 5
# Its limit after that, in multiples of the 99th percentile of its times; before, in multiples of the longest.
SLOWER, SLOWER_AT_FIRST = 5, 20
# Times remembered per section: 99 % of fewer than 100 is the longest.
REMEMBERED = 500
LOADING, BETWEEN = "loading", "between the stages"
CHECKPOINT, EXPORT = "checkpoint", "export"
ROLLOUT_HALF, TRAINING_HALF = "waiting for the rollout half", "waiting for the training half"
GENERATING = "generating beside training"
# Their limit is never learned: most saves wait for a copy in memory alone, and the last one, or one on a full day, for the disk;
# most steps find their responses drawn.
_UNLEARNED = frozenset({CHECKPOINT, EXPORT, ROLLOUT_HALF, TRAINING_HALF, GENERATING})


class AwakeClock:
    """Clock in seconds that leaves out time in which this process was stopped (Ctrl-Z, a suspended job or machine). Call `tick`
    about every `interval_s`."""

    def __init__(self, interval_s: float) -> None:
        self._longest = 5 * interval_s + 1.0  # of a tick that comes late because the machine is busy
        self._lost = 0.0
        self._last = time.monotonic()

    def tick(self) -> None:
        now = time.monotonic()
        passed, self._last = now - self._last, now
        if passed > self._longest:
            self._lost += passed

    def now(self) -> float:
        return time.monotonic() - self._lost


@dataclass(frozen=True)
class Where:
    """Section of a rank, with the seconds in it so far and its limit."""

    section: str
    step: int
    seconds: float
    limit_s: float

    def __str__(self) -> str:
        return f"{self.section}, step {self.step}, {self.seconds:.0f} s"


@dataclass
class _Open:
    """A section that has begun. since: start of its present stretch. longest_s: longest stretch before."""

    name: str
    since: float
    longest_s: float = 0.0


class Sections:
    """Marks of the work of this rank's main thread, which the watchdog's thread reads. Outside of `section` the work is loading,
    then what lies between the stages of a step; neither has a learned limit. file: gets every section that begins or goes on."""

    def __init__(self, timeouts: TimeoutsConfig, clock: AwakeClock, file: SectionFile | None = None) -> None:
        self._timeouts, self._clock, self._file = timeouts, clock, file
        self._seen: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._lock = threading.Lock()
        self._open: list[_Open] = []
        self._base, self._step, self._since = LOADING, 0, clock.now()
        self.raised_in: Where | None = None
        """Section that an exception has left last."""
        self._write()

    def of_step(self, step: int) -> Sections:
        """Count sections from here on to `step`; the first step ends the loading."""
        self._step, self._base = step, BETWEEN
        self._write()
        return self

    def turn_to(self, name: str, *, advances: bool) -> None:
        """Name the work outside of sections, where it is not the stages of steps. advances: this call notes progress, too."""
        with self._lock:
            is_new, self._base = name != self._base, name
            if is_new or advances:
                self._since = self._clock.now()
        if is_new:
            self._write()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Mark the body. A section inside another is timed on its own, and the outer one starts anew after it."""
        with self._lock:
            self._since = self._clock.now()
            self._open.append(_Open(name, self._since))
        self._write()
        try:
            yield
        except BaseException:
            self.raised_in = self.now()
            raise
        finally:
            with self._lock:
                ended = self._open.pop()
                self._since = self._clock.now()
                self._seen[name].append(max(ended.longest_s, self._since - ended.since))
            self._write()

    def advance(self) -> None:
        """Note that the present section makes progress: its limit applies to each stretch between such notes."""
        with self._lock:
            now = self._clock.now()
            if self._open:
                here = self._open[-1]
                here.longest_s, here.since = max(here.longest_s, now - here.since), now
            self._since = now

    def _write(self) -> None:
        if self._file is not None:
            self._file.write(self._name(), self._step)

    def _name(self) -> str:
        return self._open[-1].name if self._open else self._base

    def now(self) -> Where:
        with self._lock:
            name = self._name()
            return Where(name, self._step, self._clock.now() - self._since, self.limit_s(name))

    def may_stand_still(self) -> bool:
        """True where only `meeting_s` or `start_s` would end a hang: while loading, and in a section whose limit is not learned."""
        with self._lock:
            name = self._name()
            return name == LOADING or (name != BETWEEN and (name in _UNLEARNED or len(self._seen.get(name, ())) < WARM_UP))

    def limit_s(self, name: str) -> float:
        """Return `meeting_s` until a section has occurred; then, up to that, the larger of `start_s` and SLOWER_AT_FIRST times the
        longest; after WARM_UP times the larger of twice `heartbeat_s` and SLOWER times its 99th percentile."""
        times = sorted(self._seen.get(name, ()))
        if name in _UNLEARNED or not times:
            return self._timeouts.meeting_s
        if len(times) < WARM_UP:
            return min(self._timeouts.meeting_s, max(self._timeouts.start_s, SLOWER_AT_FIRST * times[-1]))
        return max(2 * self._timeouts.heartbeat_s, SLOWER * times[math.ceil(0.99 * len(times)) - 1])
