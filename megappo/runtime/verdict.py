"""A verdict on a run that hangs: who holds it up, judged by what every rank says of itself, and the report. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megappo.runtime.frames import Place
from megappo.runtime.lease_record import started_of
from megappo.runtime.messages import name_ranks, ranks_by_value
from megappo.runtime.sections import Where

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

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Verdict:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Sighting:
    """Place of one rank's main thread at the verdict, as its watchdog saw it."""

    where: Where
    place: Place

    def encode(self) -> str:
        return json.dumps({"where": asdict(self.where), "place": asdict(self.place)})

    @classmethod
    def decode(cls, text: str) -> Sighting:
        fields: dict[str, Any] = json.loads(text)
        return cls(Where(**fields["where"]), Place(**fields["place"]))

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

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Report:
        fields = json.loads(text)
        return cls(tuple(fields["culprits"]), tuple(fields["silent"]), fields["line"], fields["text"])


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
