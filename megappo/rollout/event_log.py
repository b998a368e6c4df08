"""Log of a replica's events in an asynchronous run: at which engine step it began which requests, and was pushed to. With the
requests' seeds that is all that a replica's responses depend on, to the bit. A replay does the same at the same engine steps.

One text line per event, behind a line of JSON with the facts of the run: `a 3 17.40 2` begins requests 40 and the next of step 17
that this replica has, 3 engine steps after the event before; `p 0 17` pushes version 17, `r 0 17` too and computes a cache again
that is otherwise kept; `e 5` is the end.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BATCH = 10**6
"""Requests have numbers in the engine: that of their batch times this, plus that in the batch."""
RECOMPUTED = "r"
PUSHES = ("p", RECOMPUTED)
_RESUMED = "resumed"


class Event(NamedTuple):
    kind: str
    """a, p, r or e (see above)."""
    engine_step: int
    """Engine steps of the replica before it."""
    first: int = 0
    """Number in the engine of the first request that begins; version of a push."""
    count: int = 1
    """Requests that begin."""


class EventLog:
    """Writer of a log, flushed at every push. path: None on ranks that write none. header: JSON values that a replay must share.
    script: events that a replay repeats; empty where it has none, or has done them all."""

    def __init__(self, path: Path | None, header: Mapping[str, Any], script: Sequence[Event] = ()) -> None:
        self._path, self._header, self._file = path, dict(header), None
        self.script, self.num_events = deque(script), 0
        self._last = 0  # engine step of the last event

    def begin(self, kept: Sequence[bytes] = (), *, is_resumed: bool = False) -> None:
        """Start the file, unless `resume` has. kept: lines of events."""
        if self._file is None and self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb", buffering=1 << 16)
            header = {**self._header, _RESUMED: is_resumed}
            self._file.writelines([json.dumps(header, sort_keys=True).encode() + b"\n", *kept])

    def resume(self, num_events: int | None) -> None:
        """Go on after so many events, those before a checkpoint's push; what a killed run wrote later is void. num_events: None if
        the checkpoint has other replicas, whose requests were dealt otherwise."""
        self.num_events = num_events or 0
        for _ in range(min(self.num_events, len(self.script))):
            self.script.popleft()
        is_there = self._path is not None and num_events is not None and self._path.exists()
        kept = self._path.read_bytes().splitlines(keepends=True)[1:] if self._path is not None and is_there else []
        is_whole = num_events is not None and len(kept) >= num_events
        if self._path is not None and num_events is not None and not is_whole:
            logging.getLogger(__name__).warning("%s is shorter than at the checkpoint: this run cannot be replayed", self._path)
        kept = kept[: self.num_events] if is_whole else []
        self._last = sum(int(line.split()[1]) for line in kept)
        self.begin(kept, is_resumed=not is_whole)

    def requests(self, engine_step: int, numbers: Sequence[int]) -> None:
        """Note that these requests begin, in the replica's order."""
        for first, count in _parts(numbers):
            batch, number = divmod(first, BATCH)
            self._write(f"a {engine_step - self._last} {batch}.{number} {count}", engine_step)

    def push(self, engine_step: int, version: int, *, recompute: bool) -> None:
        self._write(f"{RECOMPUTED if recompute else 'p'} {engine_step - self._last} {version}", engine_step)
        if self._file is not None:
            self._file.flush()

    def end(self, engine_step: int) -> None:
        """Close the log, which a replay needs whole."""
        self.begin()
        self._write(f"e {engine_step - self._last}", engine_step)
        if self._file is not None:
            self._file.close()

    def _write(self, line: str, engine_step: int) -> None:
        self._last, self.num_events = engine_step, self.num_events + 1
        if self._file is not None:
            self._file.write(line.encode() + b"\n")


def _parts(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Split numbers by batch; return the first and the count of each part."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] // BATCH != numbers[start] // BATCH:
            yield numbers[start], end - start
            start = end


def read_script(path: Path, header: Mapping[str, Any]) -> list[Event]:
    """Read the log of a run that is to be replayed. ValueError, in one line, if it is missing, cut, or of another run."""
    try:
        first, *lines = path.read_text(encoding="utf-8").split("\n")
        theirs = json.loads(first)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no event log: {error}") from error
    if theirs.pop(_RESUMED, True):
        raise ValueError(f"{path} begins at a resume with other replicas; only a run from its start can be replayed")
    for key in sorted(header.keys() | theirs.keys()):
        if header.get(key) != theirs.get(key):
            raise ValueError(f"{path} is of a run with {key} = {theirs.get(key)}, not {header.get(key)}; replay it with the same")
    if len(lines) < 2 or lines[-1] or not lines[-2].startswith("e "):
        raise ValueError(f"{path} is cut: it has no end; a run that was killed can be resumed, and replayed once it has ended")
    events, engine_step = [], 0
    for line in lines[:-1]:
        kind, passed, *rest = line.split(" ")
        engine_step += int(passed)
        if kind == "a":
            batch, number = rest[0].split(".")
            events.append(Event(kind, engine_step, int(batch) * BATCH + int(number), int(rest[1])))
        else:
            events.append(Event(kind, engine_step, *map(int, rest)))
    return events
