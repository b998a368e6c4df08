"""Record of the holder of a run directory, `lease.json`, and how to tell if it lives. `lease.py` takes, renews and releases it.
Imports no torch."""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import tempfile
import time
from dataclasses import asdict, field
from pathlib import Path

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from megappo.config.run_directory import LEASE

WATCH_S = 1.0  # between two looks at the beat of another host
GONE_S = 60.0  # a holder on another host is gone after so long without a beat


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class LeaseRecord:
    """Content of lease.json. since, beat: epoch seconds by the holder's clock."""

    id: str
    host: str
    pid: int
    started: int
    """Start of `pid` in ticks since boot."""
    pids: str
    """Boot id and pid namespace in which `pid` counts."""
    since: int
    beat: int
    command: str
    job: str | None
    restart: str
    """Slurm's count of restarts of `job`."""
    path: Path = field(compare=False)

    def is_alive(self) -> bool:
        """True while the holder may write to the run: its process lives, or, on another host, its last beat is less than a minute
        old."""
        known = self._known_to_live()
        return known if known is not None else self.silent_s() < GONE_S

    def outlives_watch(self) -> bool:
        """Tell for certain if the holder lives: watch the beat of another host until it changes, or for a minute. Prints a line if
        that takes time."""
        known = self._known_to_live()
        if known is not None:
            return known
        said = False
        while (left := GONE_S - self.silent_s()) > 0:
            found = read_lease(self.path.parent)
            if found is None or found != self:
                return found is not None  # it has beaten, or somebody else has taken over
            if not said:
                print(f"megappo: waiting up to {left:.0f} s for a sign of life of {self.describe()}", file=sys.stderr, flush=True)
                said = True
            time.sleep(min(left, WATCH_S))
        return False

    def _known_to_live(self) -> bool | None:
        """Return whether the process lives; None if it cannot be seen from here."""
        if (self.host, self.pids) == (socket.gethostname(), process_table()):
            return _lives(self.pid, self.started)
        # Slurm ends every process of an attempt before it starts the next.
        if self.job is not None and self.job == os.environ.get("SLURM_JOB_ID") and self.restart != restart_count():
            return False
        return None

    def silent_s(self) -> float:
        """Return the seconds since the last beat, by the file system's clock alone, as two hosts' clocks differ."""
        try:
            with self.path.open("rb") as file:  # NFS may keep the time of a file that is not opened for a minute
                written = os.fstat(file.fileno()).st_mtime
        except OSError:
            return 0.0  # no reason to take anybody for dead
        try:
            with tempfile.TemporaryFile(dir=self.path.parent, prefix=f".{LEASE}.") as probe:
                now = os.fstat(probe.fileno()).st_mtime
        except OSError:  # a directory that this user can only read
            now = time.time()
        return now - written

    def describe(self) -> str:
        """Put holder, machine and time into words."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        job = f", Slurm job {self.job}" if self.job is not None else ""
        return f"`{self.command}` (process {self.pid} on {self.host}{job}) since {since}"


def read_lease(run_dir: Path) -> LeaseRecord | None:
    """Read the record of the last holder, dead or alive; None if nobody has the run. ValueError, one line, if it cannot be read."""
    record, seen = read_record(run_dir / LEASE), set()
    # A process that takes over is the holder from the moment it announces itself.
    while record is not None and record.id not in seen and (successor := read_record(claim_after(run_dir, record.id))) is not None:
        seen.add(record.id)
        record = successor
    return record


def claim_after(run_dir: Path, lease_id: str) -> Path:
    return run_dir / f".{LEASE}.after-{lease_id}"


def read_record(path: Path) -> LeaseRecord | None:
    """Read a lease; None if there is none. ValueError, one line with the way out, if it is unreadable or not a record."""
    try:
        record = LeaseRecord(**json.loads(path.read_bytes()), path=path)
        if not record.id.isalnum():
            raise ValueError("an id that is no part of a file's name")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a record of megappo"
        raise ValueError(f"{path}: {reason}; if no process writes to this run, remove the file") from None
    return record


def encode(record: LeaseRecord) -> bytes:
    content = {name: value for name, value in asdict(record).items() if name != "path"}
    return (json.dumps(content, indent=1) + "\n").encode()


# ------------------------------------------------------------------------------------------------------------- processes


def started_of(pid: int) -> int | None:
    """Return a process's start in ticks since boot; None if it cannot be seen or has ended (a zombie included)."""
    try:
        # The name, in brackets, may hold blanks and brackets. State and start are fields 3 and 22.
        after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace", encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return int(after_name[19]) if after_name[0] not in "ZX" else None


def _lives(pid: int, started: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, which /proc may hide
        return not Path(f"/proc/{pid}").exists() or started_of(pid) == started
    return (started_of(pid) or 0) == started  # 0 where there is no /proc


@functools.cache
def process_table() -> str:
    """Identify the table that process ids count in: it differs between containers of a host, and after a boot."""
    parts = []
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip(),
        lambda: os.readlink("/proc/self/ns/pid"),
    ):
        try:
            parts.append(read())
        except OSError:  # not Linux
            parts.append("")
    return " ".join(parts)


def restart_count() -> str:
    return os.environ.get("SLURM_RESTART_COUNT", "0")  # unset in a job's first attempt
