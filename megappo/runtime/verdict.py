"""A verdict on a run that hangs: who holds it up, judged by what every rank says of itself, and the report. Where a thread waits
or works is read from its Python frames, which costs nothing until asked. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType

from pydantic import TypeAdapter

from megappo.runtime.lease_record import started_of
from megappo.runtime.messages import name_ranks, ranks_by_value
from megappo.runtime.sections import Where

# Modules whose functions exchange something between ranks; the last waits for the GPU, whose queue may hold an exchange.
_EXCHANGES = ("torch.distributed", "megatron.core.pipeline_parallel.p2p_communication", "torch.cuda", "torch.accelerator")
# Other modules in which an exchange may wait.
_INSIDE_EXCHANGES = ("torch.", "contextlib")
_MEETING = "megappo.parallel.meeting"
# Wrappers of exchanges: the place that matters is their caller's.
_WRAPPERS = ("megappo.parallel.",)
# A method of an object of C++ has no frame of its own.
_WAITS_IN_LINE = (".wait(", ".synchronize(")


@dataclass(frozen=True)
class Place:
    """Place of a thread in the code."""

    waits_in: str | None
    """Name of the exchange that it waits in; None if it works."""
    at: str
    """Line of megappo, or of the code that it calls."""

    def __str__(self) -> str:
        return f"{self.waits_in} in {self.at}" if self.waits_in else f"not in an exchange, at {self.at}"


def main_thread_place() -> Place:
    """Return the place of the main thread, or, if that is in no exchange, of another thread that is in one (a backward pass)."""
    main = threading.main_thread().ident
    frames = sys._current_frames()
    place = place_of(frames[main]) if main in frames else Place(None, "(no frame)")
    if place.waits_in is None:
        for ident, frame in frames.items():
            other = place_of(frame)
            is_watchdogs = any(_module(each).startswith("megappo.runtime") for each in _outwards(frame))
            if ident != threading.get_ident() and other.waits_in is not None and not is_watchdogs:
                return other
    return place


def place_of(innermost: FrameType) -> Place:
    """Return a thread's place in the code, from its innermost frame."""
    stack = list(_outwards(innermost))
    waits_in, begin = None, 0
    for index, frame in enumerate(stack):
        name = _module(frame)
        if name == _MEETING and "point" in frame.f_locals:
            waits_in, begin = f"the meeting before {frame.f_locals['point'].work}", index
            break
        if name.startswith(_EXCHANGES):
            # The outermost of these functions is the one that the code calls: all_gather_object, not its all_gather.
            while index + 1 < len(stack) and _module(stack[index + 1]).startswith(_EXCHANGES):
                index += 1
            waits_in, begin = _function(stack, index), index + 1
            break
        if not name.startswith(_INSIDE_EXCHANGES):
            break  # work, even if an exchange has called it
    if waits_in is None and _module(innermost).startswith(("megatron.", "megappo.", "torch.")):
        line = linecache.getline(innermost.f_code.co_filename, innermost.f_lineno).strip()
        if any(wait in line for wait in _WAITS_IN_LINE):
            waits_in = line
    ours = [frame for frame in stack[begin:] if _module(frame).startswith("megappo.")]
    callers = [frame for frame in ours if not _module(frame).startswith(_WRAPPERS)]
    nearest = next(iter(callers or ours or stack[begin:]), innermost)
    at = _line(nearest)
    if waits_in is None and nearest is not innermost:
        at = f"{_line(innermost)}, called from {at}"
    return Place(waits_in, at)


def raised_in_exchange(error: BaseException) -> bool:
    """True if the error came out of an exchange between ranks."""
    trace = error.__traceback__
    return trace is not None and place_of(innermost_frame(trace)).waits_in is not None


def innermost_frame(trace: TracebackType) -> FrameType:
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame


def _function(stack: list[FrameType], index: int) -> str:
    # torch wraps its functions in `wrapper`
    while index > 0 and stack[index].f_code.co_name == "wrapper":
        index -= 1
    return stack[index].f_code.co_name


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _line(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} ({frame.f_code.co_name})"


VERDICT = "verdict.json"
"""File of an attempt's folder, or of the run's: {time_ns, rank, host, text}."""
LAUNCHER = -1


@dataclass(frozen=True)
class Member:
    """One rank of the world, as others need it to name or end it. started: of its process, in ticks since boot."""

    rank: int
    host: str
    pid: int
    started: int

    @classmethod
    def of_process(cls, rank: int, pid: int) -> Member:
        return cls(rank, socket.gethostname(), pid, started_of(pid) or 0)

    def is_here(self) -> bool:
        """True if its process lives on this host; another process may have its pid by now."""
        return self.host == socket.gethostname() and started_of(self.pid) == self.started


@dataclass(frozen=True)
class Verdict:
    """The first suspicion, which ends the run. rank: the suspect. by: rank that raised it, or LAUNCHER."""

    rank: int
    why: str
    by: int
    time_ns: int

    @classmethod
    def now(cls, rank: int, why: str, by: int) -> Verdict:
        return cls(rank, why, by, time.time_ns())


@dataclass(frozen=True)
class Sighting:
    """Place of one rank's main thread at the verdict, as its watchdog saw it."""

    where: Where
    place: Place

    def kind(self) -> tuple[str, int, str]:
        """Return section, step and place: equal for ranks that wait for each other."""
        return self.where.section, self.where.step, str(self.place)


@dataclass(frozen=True)
class Report:
    """Result of a verdict. culprits: ranks that hold up the others. silent: culprits that said nothing. line: one line; text: all
    ranks."""

    culprits: tuple[int, ...]
    silent: tuple[int, ...]
    line: str
    text: str


VERDICTS, SIGHTINGS, REPORTS = TypeAdapter(Verdict), TypeAdapter(Sighting), TypeAdapter(Report)
"""Readers of the texts that `encode` makes for the job's store."""


def encode(one: Verdict | Sighting | Report) -> str:
    return json.dumps(asdict(one))


def judge(
    verdict: Verdict, members: Sequence[Member], sightings: Mapping[int, Sighting], folder: Path, last: Mapping[int, Where] = {}
) -> Report:
    """Name the culprits: silent ranks, else ranks in no exchange, else the fewest that wait in another exchange than the rest, else
    the suspect of the verdict. last: section of a silent rank at its last sign of life."""
    silent = tuple(member.rank for member in members if member.rank not in sightings)
    working = tuple(rank for rank, sighting in sorted(sightings.items()) if sighting.place.waits_in is None)
    groups = ranks_by_value({rank: sighting.kind() for rank, sighting in sightings.items()})
    if silent:
        culprits, how = silent, "no sign of life: stopped, dead, or its interpreter is blocked"
    elif working:
        culprits, how = working, "in no exchange while the others wait" if len(working) < len(members) else verdict.why
    elif len(groups) > 1:
        fewest = [ranks for ranks in groups.values() if len(ranks) == len(next(iter(groups.values())))]
        # Without a majority nobody can tell who left the schedule.
        culprits = tuple(sorted(rank for ranks in fewest for rank in ranks))
        how = "in another exchange than the others" if len(fewest) == 1 else "in different exchanges"
    else:
        culprits, how = (verdict.rank,), verdict.why
    hosts = ", ".join(dict.fromkeys(member.host for member in members if member.rank in culprits))
    first = culprits[0]
    seen = sightings.get(first)
    where = str(seen.where) if seen else f"last seen in {last[first]}" if first in last else "section unknown"
    holds = "hangs" if len(culprits) == 1 else "hang"
    line = f"{name_ranks(culprits)} on {hosts} {holds} ({where}): {how}"
    noticed_by = "the launcher" if verdict.by == LAUNCHER else f"rank {verdict.by}"
    lines = [f"megappo: {line}", f"megappo: noticed by {noticed_by}: {verdict.why}"]
    lines += [f"  rank {rank}: nothing heard, {f'last seen in {last[rank]}' if rank in last else 'ever'}" for rank in silent]
    for (section, step, place), ranks in groups.items():
        longest = max(sightings[rank].where.seconds for rank in ranks)
        lines.append(f"  {name_ranks(ranks)}: {place} ({section}, step {step}, {longest:.0f} s)")
    lines.append(f"  stacks of every thread: {folder}/rank-N.stacks, or rank-N.late.stacks")
    return Report(culprits, silent, line, "\n".join(lines) + "\n")


def record_verdict(folder: Path, report: Report, verdict: Verdict, members: Sequence[Member]) -> None:
    """Write VERDICT, for the launcher's own report (`runtime/failure.py`), unless another rank has."""
    first = report.culprits[0]
    host = next(member.host for member in members if member.rank == first)
    content = {"time_ns": verdict.time_ns, "rank": first, "host": host, "text": report.text}
    part = folder / f"{VERDICT}.{verdict.by}"
    part.write_text(json.dumps(content) + "\n", encoding="utf-8")
    with contextlib.suppress(FileExistsError):
        os.link(part, folder / VERDICT)  # the first one counts: ranks without a store write one each
    part.unlink()
