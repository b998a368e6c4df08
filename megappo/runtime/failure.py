"""The first rank that failed, and its message: every rank leaves its evidence in one folder, and the job reads it at the end.

    rank-3.log         output of the rank
    rank-3.traceback   written the moment an exception reaches the top, before the process is taken down
    rank-3.stacks      stacks of all threads, of a run that hung (`runtime/watchdog.py`)
    rank-3.late.stacks the same, of a rank that could not be asked for them
    verdict.json       the rank that held it up, with the watchdogs' report
    rank-3.section     section of work of a rank that was killed, which removes it otherwise (`runtime/sections.py`)
    rank-3.exit        exit code, time (ns), step and node, written by the shell that starts the rank; absent if the shell was
                       killed with the rank
    spare_ranks        ranks without which the run goes on if they are killed; those of a line end and start together. Training rank
                       0 writes it
    rank-3.lost        as `rank-3.exit`, of such a rank
    rank-3.joining     how often such a rank was started again, 0 for one that has yet to end; training rank 0 removes both once it
                       takes part

The folder is named by MEGAPPO_ATTEMPT_DIR; without it nothing is recorded.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from types import TracebackType

from megappo.runtime.ending import FAILED, KILLED, describe_exit
from megappo.runtime.life import LAUNCHER_LISTENS
from megappo.runtime.sections import last_section
from megappo.runtime.verdict import VERDICT

ATTEMPT_DIR = "MEGAPPO_ATTEMPT_DIR"
SPARE_RANKS = "spare_ranks"
LOG_LINES, LOG_BYTES = 20, 1 << 16  # at most, of the end of a log
MOST_CHARACTERS = 240  # of an error in one line: torch's "out of memory" goes on with advice
# Seconds from the first end to that of all ranks in a job script: for the tracebacks of the others, and for a late witness.
KILL_GRACE_S = 2


@dataclass(frozen=True)
class Failure:
    """The first failure of a run."""

    rank: int
    host: str
    code: int | None
    """Exit code as a shell gives it; None if nobody waited for the rank."""
    text: str
    """Traceback, or end of the rank's log, or the watchdogs' report if it hangs."""
    hangs: bool = False
    section: str | None = None
    """Section of a rank that could not name it itself; None if unknown."""

    @property
    def how(self) -> str:
        """`killed by SIGKILL in update_policy, step 3`."""
        return describe_exit(self.code or FAILED) + self._where

    @property
    def _where(self) -> str:
        return f" in {self.section}" if self.section is not None else ""

    def report(self) -> str:
        if self.hangs:
            return f"{self.text.rstrip()}\nmegappo: rank {self.rank} on {self.host} hangs, and the ranks were ended\n"
        how = describe_exit(self.code) if self.code is not None else "exception"
        if self.code == KILLED:
            how += ": by hand, or by the kernel for want of host memory, see dmesg or sacct"
        said = f"{self.text.rstrip()}\n" if self.text.strip() else ""
        where = "what it said is above" if said else "it said nothing"
        return f"{said}megappo: rank {self.rank} on {self.host} failed first ({how}){self._where}; {where}\n"

    def in_one_line(self) -> str:
        """Return `rank 1: RuntimeError: text`, which rank hangs, or how it ended if it raised nothing."""
        if self.hangs:  # the report's first line names rank, host and section
            return shorten(self.text.splitlines()[0].removeprefix("megappo: "), MOST_CHARACTERS, placeholder=" ...")
        error = error_line(self.text)
        return f"rank {self.rank}: {error}" if error else f"rank {self.rank} on {self.host}: {self.how}"


def error_line(text: str) -> str | None:
    """Return the error at the end of a traceback in one line of at most MOST_CHARACTERS; None if `text` holds no traceback."""
    if "Traceback" not in text:
        return None
    lines = text.rpartition("Traceback (most recent call last):")[2].strip("\n").splitlines()
    said = next((number for number, line in enumerate(lines) if not line.startswith(" ")), len(lines) - 1)
    return shorten(" ".join(lines[said:]), MOST_CHARACTERS, placeholder=" ...")


def record_exceptions(rank: int) -> None:
    """Keep the traceback of an exception that ends this process, for `first_failure`; print that of a crash in C code."""
    if sys.__stderr__ is not None:  # closed; and sys.stderr may be a stream without a file
        faulthandler.enable(sys.__stderr__)
    folder = os.environ.get(ATTEMPT_DIR)
    if folder is None:
        return

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        content = {
            "time_ns": time.time_ns(),
            "host": socket.gethostname(),
            "text": "".join(traceback.format_exception(kind, error, trace)),
        }
        sys.__excepthook__(kind, error, trace)
        Path(folder, f"rank-{rank}.traceback").write_text(json.dumps(content) + "\n", encoding="utf-8")

    sys.excepthook = record


def is_first_to_say(text: str) -> bool:
    """True unless another rank of this machine's launcher has said the same, so a mistake that all ranks find is one line."""
    if LAUNCHER_LISTENS not in os.environ or ATTEMPT_DIR not in os.environ:  # every rank of a job has a log of its own
        return True
    name = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    try:
        os.close(os.open(Path(os.environ[ATTEMPT_DIR], f"said-{name}"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:  # a full disk
        return True
    return True


def first_failure(folder: Path, kill_grace_s: float = 0.0) -> Failure | None:
    """Find the rank that failed first; None if no rank left evidence. Ranks that lose a peer fail too, so the oldest traceback
    counts. A rank that ended first without a traceback counts if it was killed from outside, or if no traceback is older than its
    end."""
    tracebacks = {_rank(path): json.loads(path.read_text(encoding="utf-8")) for path in _whole(folder.glob("rank-*.traceback"))}
    exits = {_rank(path): _Exit.read(path) for path in _whole(folder.glob("rank-*.exit"))}
    verdict = next((json.loads(path.read_text(encoding="utf-8")) for path in _whole(folder.glob(VERDICT))), None)
    earlier = (*(found["time_ns"] for found in tracebacks.values()), *(found.time_ns for found in exits.values()))
    if verdict is not None and verdict["time_ns"] < min(earlier, default=time.time_ns()):
        # A hang ends all ranks, and the culprit last, so the order of exits says nothing.
        code = exits[verdict["rank"]].code if verdict["rank"] in exits else None
        return Failure(verdict["rank"], verdict["host"], code, verdict["text"], hangs=True)
    raised = min(tracebacks, key=lambda rank: tracebacks[rank]["time_ns"], default=None)
    by_time = sorted(exits, key=lambda rank: exits[rank].time_ns)
    # The end of a killed rank may be noticed after that of its victims. The launcher kills nobody within kill_grace_s of the
    # first end, so a kill in that time came from outside and was first.
    alive_until = exits[by_time[0]].time_ns + int(kill_grace_s * 1e9) if by_time else 0
    killed = [r for r in by_time if exits[r].code == KILLED and r not in tracebacks and exits[r].time_ns < alive_until]
    ended = next(iter(killed + by_time), None)
    if ended is not None and ended not in tracebacks:
        first = exits[ended]
        if first.code == KILLED or raised is None or first.time_ns < tracebacks[raised]["time_ns"]:
            said = _end_of_log(folder / f"rank-{ended}.log")
            return Failure(ended, first.host, first.code, said, section=last_section(folder, ended))
    if raised is None:
        return None
    seen = exits.get(raised)
    host = seen.host if seen is not None else tracebacks[raised]["host"]
    return Failure(raised, host, seen.code if seen is not None else None, tracebacks[raised]["text"])


def spare_with(folder: Path, rank: int) -> list[int]:
    """Return the ranks that end and start with this one, which the run goes on without if it is killed; [] if it does not."""
    with contextlib.suppress(OSError):
        lines = [line.split() for line in (folder / SPARE_RANKS).read_text(encoding="utf-8").splitlines()]
        return next((list(map(int, line)) for line in lines if str(rank) in line), [])
    return []


def is_joining(folder: Path, rank: int) -> bool:
    """True if this rank takes no part: it was lost, or started again since."""
    return _joining(folder, rank).exists()


def note_lost(folder: Path, rank: int) -> None:
    """Note that a rank takes no part any more, so that its end, whenever it comes, ends no other."""
    with contextlib.suppress(OSError), _joining(folder, rank).open("x", encoding="utf-8") as file:  # unless it has started again
        file.write("0")


def note_joining(folder: Path, rank: int, start: int) -> None:
    """Note that a lost rank starts again. start: how often its replica did."""
    _joining(folder, rank).write_text(str(start), encoding="utf-8")


def note_joined(folder: Path, ranks: Sequence[int]) -> None:
    """Note that these take part again."""
    for rank in ranks:
        (folder / f"rank-{rank}.lost").unlink(missing_ok=True)
        _joining(folder, rank).unlink(missing_ok=True)


def joining_as(rank: int) -> str | None:
    """Return the number of its start if this process is a rank that was lost; None if it started with the others."""
    path = _joining(Path(os.environ.get(ATTEMPT_DIR, "")), rank)
    return path.read_text(encoding="utf-8").strip() if ATTEMPT_DIR in os.environ and path.exists() else None


def _joining(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.joining"


def end_of_lost(folder: Path, rank: int) -> str | None:
    """Return how a spare rank ended, such as `killed by SIGKILL`; None while it lives, as far as its launcher has noticed."""
    with contextlib.suppress(OSError, ValueError):
        return describe_exit(_Exit.read(folder / f"rank-{rank}.lost").code)
    return None


@dataclass(frozen=True)
class _Exit:
    code: int
    time_ns: int
    host: str

    @classmethod
    def read(cls, path: Path) -> _Exit:
        code, time_ns, _, *host = path.read_text(encoding="utf-8").split()
        return cls(int(code), int(time_ns), " ".join(host))


def _whole(paths: Iterable[Path]) -> list[Path]:
    # Each is one line; without its newline the writer was killed or the disk full.
    return [path for path in paths if path.read_text(encoding="utf-8").endswith("\n")]


def _rank(path: Path) -> int:
    return int(path.stem.removeprefix("rank-"))


def _end_of_log(log: Path) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - LOG_BYTES)  # a rank may have printed gigabytes
        file.seek(start)
        lines = file.read(LOG_BYTES).decode(errors="replace").splitlines()
    return "\n".join(lines[-LOG_LINES:])
