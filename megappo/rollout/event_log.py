"""Log of a replica's events in an asynchronous run: at which engine step it began which requests, and was pushed to. With the
requests' seeds that is all that a replica's responses depend on, to the bit. A replay does the same at the same engine steps.

One text line per event, behind a line of JSON with the facts of the run: `a 3 17.40 2` begins requests 40 and the next of step 17
that this replica has, 3 engine steps after the event before; `p 0 17` pushes version 17, `r 0 17` too and computes a cache again
that is otherwise kept; `o 0 17.40 [...]` is the environment's answer to a turn, `v 0 17.40 {...}` verdicts on a response: a
replay asks neither again. `e 5 79d` is the end, with the CRC-32 of all events before it. With several replicas, `h 4 17` hands
over batch 17, and `l 0 1 [5,2,[1]]` deals the requests of replica 1 again, which was lost two hand-overs after push 5; with
`j 0 1 [6,2,[1]]` it takes part again. In its own log `x 0 0` is between what it did before and after, and engine steps begin anew.
"""

from __future__ import annotations

import contextlib
import json
import logging
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megappo.rollout.turns import Answer
from megappo.rollout.types import BATCH

RECOMPUTED = "r"
PUSHES = ("p", RECOMPUTED)
HAND_OVER, LOSS, JOINED, LOST = "h", "l", "j", "x"
_RESUMED = "resumed"


class Event(NamedTuple):
    kind: str
    """a, p, r, o, v, h, l, j or e (see above); x where a replica was lost."""
    engine_step: int
    """Engine steps of the replica before it."""
    first: int = 0
    """Number in the engine of the first request that begins, or of the one that is answered or judged; version of a push; batch
    that is handed over; replica that is lost or joins."""
    count: int = 1
    """Requests that begin."""
    value: Any = None
    """The answer, or part of the reward -> JSON values of its verdict, or what a `Change` holds."""


class Change(NamedTuple):
    """Replicas that are lost, in the order in which their requests are dealt again, or one that joins. at: last version that was
    pushed before, and the number of hand-overs since."""

    at: tuple[int, int]
    replicas: tuple[int, ...]
    joins: bool = False


class EventLog:
    """Writer of a log, flushed at every push. path: None on ranks that write none, and once it could not be written. header: JSON
    values that a replay must share. script: events that a replay repeats; empty where it has none, or has done them all."""

    def __init__(self, path: Path | None, header: Mapping[str, Any], script: Sequence[Event] = ()) -> None:
        self._path, self._header, self._file = path, dict(header), None
        self.script, self.num_events = deque(script), 0
        self._last = self._sum = 0  # engine step of the last event; CRC-32 of all
        self._before = (0, 0, 0, 0)  # place in the file, and the three numbers, to which `take_back` returns

    def begin(self, kept: Sequence[bytes] = (), *, is_resumed: bool = False) -> None:
        """Start the file, unless `resume` has. kept: lines of events."""
        if self._file is None and self._path is not None:
            header = json.dumps({**self._header, _RESUMED: is_resumed}, sort_keys=True)
            with self._given_up_on_error(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("wb", buffering=1 << 16)
                self._file.writelines([header.encode() + b"\n", *kept])

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
        since = max((place for place, line in enumerate(kept) if line.startswith(LOST.encode())), default=0)
        self._last, self._sum = sum(int(line.split()[1]) for line in kept[since:]), zlib.crc32(b"".join(kept))
        self.begin(kept, is_resumed=not is_whole)

    @property
    def begins_again(self) -> bool:
        """True if the replica of the script was lost and came back."""
        return any(event.kind == LOST for event in list(self.script)[:-1])

    def begin_again(self) -> None:
        """Go on behind what a process has left that was lost. ValueError, in one line, if that is of another run."""
        while self.script and self.script.popleft().kind != LOST:
            pass
        is_there = self._file is None and self._path is not None and self._path.exists()
        content = self._path.read_bytes().splitlines(keepends=True) if self._path is not None and is_there else []
        if self._path is not None and content:
            first, *lines = content
            theirs = json.loads(first)
            is_resumed = theirs.pop(_RESUMED, True)
            _require_same(self._path, self._header, theirs, "start this rank again with the same")
            kept = [line for line in lines if line.endswith(b"\n")]  # it may have been killed while it wrote
            self.num_events, self._sum = len(kept), zlib.crc32(b"".join(kept))
            self.begin(kept, is_resumed=is_resumed)
        self.begin(is_resumed=True)
        self._last = 0
        self._write(f"{LOST} 0 0", 0, flush=True)

    def requests(self, engine_step: int, numbers: Sequence[int]) -> None:
        """Note that these requests begin, in the replica's order."""
        for first, count in _parts(numbers):
            self._write(f"a {engine_step - self._last} {_name(first)} {count}", engine_step)

    def push(self, engine_step: int, version: int, *, recompute: bool) -> None:
        self._write(f"{RECOMPUTED if recompute else 'p'} {engine_step - self._last} {version}", engine_step, flush=True)

    def hand_over(self, engine_step: int, batch: int) -> None:
        self._write(f"{HAND_OVER} {engine_step - self._last} {batch}", engine_step, flush=True)

    def change(self, kind: str, engine_step: int, replicas: Sequence[int], at: Sequence[int]) -> None:
        """Note that these are lost, and their requests dealt again (LOSS), or that one joins (JOINED). at: as of a `Change`."""
        value = json.dumps([*at, list(replicas)], separators=(",", ":"))
        self._write(f"{kind} {engine_step - self._last} {replicas[0]} {value}", engine_step, flush=True)

    def mark(self) -> None:
        """Note the place to which `take_back` returns."""
        place = 0
        if self._file is not None and self._path is not None:
            with self._given_up_on_error(self._path):
                place = self._file.tell()
        self._before = place, self.num_events, self._last, self._sum

    def take_back(self) -> None:
        """Remove the events since the last `mark`."""
        place, self.num_events, self._last, self._sum = self._before
        if self._file is not None and self._path is not None:
            with self._given_up_on_error(self._path):
                self._file.seek(place)
                self._file.truncate()

    def answer(self, engine_step: int, number: int, answer: Answer) -> None:
        """Note the environment's answer to the turn of a request, with which the request goes on."""
        observation = None if answer.observation is None else [int(one) for one in answer.observation]
        self._value("o", engine_step, number, [observation, answer.seconds, answer.is_late, answer.no_verdict, answer.fault])

    def verdicts(self, engine_step: int, number: int, verdicts: Mapping[str, Sequence[Any]]) -> None:
        """Note what parts of the reward say about a response."""
        self._value("v", engine_step, number, verdicts)

    def _value(self, kind: str, engine_step: int, number: int, value: Any) -> None:
        text = json.dumps(value, separators=(",", ":"))
        self._write(f"{kind} {engine_step - self._last} {_name(number)} {text}", engine_step)

    def end(self, engine_step: int) -> None:
        """Close the log, which a replay needs whole."""
        self.begin()
        self._write(f"e {engine_step - self._last} {self._sum:x}", engine_step, flush=True)
        if self._file is not None:
            self._file.close()

    def _write(self, line: str, engine_step: int, *, flush: bool = False) -> None:
        self._last, self.num_events = engine_step, self.num_events + 1
        data = line.encode() + b"\n"
        self._sum = zlib.crc32(data, self._sum)
        if self._file is not None and self._path is not None:
            with self._given_up_on_error(self._path):
                self._file.write(data)
                if flush:
                    self._file.flush()

    @contextlib.contextmanager
    def _given_up_on_error(self, path: Path) -> Iterator[None]:
        """Warn of a full or lost disk, and write no more: a log with a gap is none. A resume and a replay find it too short."""
        try:
            yield
        except OSError as error:
            logging.getLogger(__name__).warning("%s cannot be written (%s): this run cannot be replayed", path, error.strerror)
            broken, self._file, self._path = self._file, None, None
            if broken is not None:
                with contextlib.suppress(OSError):  # closing writes what is left, and fails again
                    broken.close()


def _name(number: int) -> str:
    return "{}.{}".format(*divmod(number, BATCH))


def _number(name: str) -> int:
    batch, number = name.split(".")
    return int(batch) * BATCH + int(number)


def _parts(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Split numbers by batch; return the first and the count of each part."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] // BATCH != numbers[start] // BATCH:
            yield numbers[start], end - start
            start = end


def read_changes(paths: Sequence[Path]) -> list[Change]:
    """Return what the logs of a run's replicas say about those that were lost or have joined, in order."""
    found: dict[tuple[int, int], list[Change]] = {}
    for path in paths:
        theirs: dict[tuple[int, int], list[Change]] = {}
        for line in path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []:
            if (kind := line[:1]) in (LOSS, JOINED):
                version, handed, replicas = json.loads(line.split(" ", 3)[3])
                theirs.setdefault((version, handed), []).append(Change((version, handed), tuple(replicas), kind == JOINED))
        for at, changes in theirs.items():  # a replica that was lost itself knows less
            found[at] = max(found.get(at, []), changes, key=len)
    return [change for at in sorted(found) for change in found[at]]


def _require_same(path: Path, header: Mapping[str, Any], theirs: Mapping[str, Any], fix: str) -> None:
    for key in sorted(header.keys() | theirs.keys()):
        if header.get(key) != theirs.get(key):
            raise ValueError(f"{path} is of a run with {key} = {theirs.get(key)}, not {header.get(key)}; {fix}")


def read_script(path: Path, header: Mapping[str, Any], *, was_lost: bool = False) -> list[Event]:
    """Read the log of a run that is to be replayed. was_lost: its replica was, and it has no end. ValueError, in one line, if it is
    missing, cut, changed, or of another run."""
    try:
        first, *lines = path.read_text(encoding="utf-8").split("\n")
        theirs = json.loads(first)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no event log: {error}") from error
    if theirs.pop(_RESUMED, True):
        raise ValueError(f"{path} begins at a resume with other replicas; only a run from its start can be replayed")
    _require_same(path, header, theirs, "replay it with the same")
    if was_lost:
        lines[-1:] = []  # cut where it was killed
        lines += [f"{LOST} 0 0", ""]
    elif len(lines) < 2 or lines[-1] or not lines[-2].startswith("e "):
        raise ValueError(f"{path} is cut: it has no end; a run that was killed can be resumed, and replayed once it has ended")
    found = zlib.crc32("".join(f"{line}\n" for line in lines[:-2]).encode())
    if not was_lost and lines[-2].split(" ")[-1] != f"{found:x}":
        raise ValueError(f"{path} was changed: its events have another sum than its end says; replay it as it was written")
    events, engine_step = [], 0
    for line in lines[:-1]:
        kind, passed, first, *rest = line.split(" ", 3)
        engine_step += int(passed)
        match kind:
            case "a":
                events.append(Event(kind, engine_step, _number(first), int(rest[0])))
            case "o":
                events.append(Event(kind, engine_step, _number(first), value=Answer(*json.loads(rest[0]))))
            case "v":
                events.append(Event(kind, engine_step, _number(first), value=json.loads(rest[0])))
            case "l" | "j":
                events.append(Event(kind, engine_step, int(first), value=json.loads(rest[0])))
            case "x":
                events.append(Event(kind, engine_step))
                engine_step = 0
            case "e":
                events.append(Event(kind, engine_step))
            case _:
                events.append(Event(kind, engine_step, int(first)))
    return events
