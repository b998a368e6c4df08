"""Lease of a run directory: one process has a run, and all others can see which, where, since when, and if it still lives.

RUN/lease.json           record of the holder, whose beat is rewritten every 5 s
RUN/.lease.json.after-X  record of the process that takes over from X, which is gone; made once for each X, so one of many wins

A launcher takes the lease before it starts ranks, and passes its id to them in MEGAPPO_LEASE; without such a launcher rank 0 takes
it. A holder that finds another one in its place ends its process at once: two writers would destroy each other's checkpoints.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from megappo.config.redaction import hide_secrets
from megappo.config.run_directory import LEASE
from megappo.runtime.ending import UNRECOVERABLE
from megappo.runtime.lease_record import (
    LeaseRecord,
    claim_after,
    encode,
    process_table,
    read_lease,
    read_record,
    restart_count,
    started_of,
)

logger = logging.getLogger(__name__)

LEASE_VARIABLE = "MEGAPPO_LEASE"  # id of the lease that the launcher of this rank holds
LAUNCHER_VARIABLE = "MEGAPPO_LAUNCHER"  # its process id
BEAT_S = 5.0
_ATTEMPTS = 5  # to take a lease that others take and release at the same time


class LeaseHeld(ValueError):
    """Another process has the run."""


def refuse_if_held(run_dir: Path) -> None:
    """Raise LeaseHeld, one line, if another living process has the run; touches nothing."""
    record = read_lease(run_dir)
    if record is not None and record.id != os.environ.get(LEASE_VARIABLE) and record.is_alive():
        raise _held(run_dir, record)


class Lease:
    """Lease of a run directory, from `acquire` to `release`; a context manager that releases it."""

    def __init__(self, record: LeaseRecord, file: int | None = None, made: tuple[Path, ...] = ()) -> None:
        """Make a lease. file: descriptor of the record; None if another process holds it. made: directories to remove if still
        empty."""
        self.id = record.id
        self._record, self._file, self._made = record, file, made
        self._pid, self._released = os.getpid(), threading.Event()
        self._lock = threading.Lock()  # between the thread that beats and `release`

    @classmethod
    def acquire(cls, run_dir: Path, command: str) -> Lease:
        """Take the lease of a directory, which is made if missing, and renew it from now on. command: for the message to others.
        LeaseHeld if a living process has it, ValueError if it cannot be written; one line each."""
        job = os.environ.get("SLURM_JOB_ID")
        now, started = int(time.time()), started_of(os.getpid()) or 0
        who = (socket.gethostname(), os.getpid(), started, process_table(), now, now, hide_secrets(" ".join(command.split())))
        record = LeaseRecord(secrets.token_hex(6), *who, job, restart_count(), path=run_dir.absolute() / LEASE)
        try:
            made = _make(run_dir)
            file = _take(record)
        except OSError as error:
            reason = f"{error.strerror} ({error.filename})" if error.filename else error.strerror
            raise ValueError(
                f"{run_dir}: its lease cannot be written: {reason}; the file system must have space and hard links"
            ) from None
        lease = cls(record, file, made)
        threading.Thread(target=lease._beat_on, name="lease", daemon=True).start()
        return lease

    @classmethod
    def of_launcher(cls, run_dir: Path, lease_id: str) -> Lease:
        """Return the lease that this rank's launcher holds. LeaseHeld if the launcher has lost it."""
        record = read_lease(run_dir)
        if record is None or record.id != lease_id:
            who = record.describe() if record is not None else "nobody"
            raise LeaseHeld(f"{run_dir}: the launcher of these ranks has lost the run; {who} has it")
        return cls(record)

    def release(self) -> None:
        """Remove the record if it is this process's own."""
        if self._file is None or os.getpid() != self._pid or self._released.is_set():  # a forked child holds nothing
            return
        self._released.set()
        with self._lock, contextlib.suppress(OSError, ValueError):  # what is left names a process that has ended
            os.close(self._file)
            found = read_record(self._record.path)
            if found is not None and found.id == self.id:
                self._record.path.unlink()
        with contextlib.suppress(OSError):  # not empty
            for folder in self._made:
                folder.rmdir()

    def __reduce__(self) -> tuple[type[Lease], tuple[LeaseRecord]]:
        return Lease, (self._record,)  # sent to another process, it names the holder and holds nothing

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def beat(self) -> None:
        """Renew the lease. Ends the process with UNRECOVERABLE if another one has it. OSError or ValueError if renewing fails."""
        assert self._file is not None, "only the holder beats"
        found = read_lease(self._record.path.parent)
        if found is None:  # removed by hand
            self._file, removed = _take(self._record), self._file
            os.close(removed)
        elif found.id != self.id:
            text = f"megappo: {self._record.path.parent}: this process has lost the run to {found.describe()} and ends here\n"
            os.write(sys.stderr.fileno() if sys.stderr is not None else 2, text.encode())
            os._exit(UNRECOVERABLE)  # whatever the main thread does: it may be writing; a restart would find the other one again
        # In place, into the file that this process made: the record of a successor is never overwritten. The length stays the
        # same, so a reader finds a record at any time, and a full disk does not matter.
        os.pwrite(self._file, encode(replace(self._record, beat=int(time.time()))), 0)
        os.fsync(self._file)  # or other hosts would see it half a minute later

    def _beat_on(self) -> None:
        warned = False
        while not self._released.wait(BEAT_S):
            try:
                with self._lock:
                    if not self._released.is_set():
                        self.beat()
                warned = False
            except (OSError, ValueError) as error:
                if not warned:
                    logger.warning("%s: the lease cannot be renewed: %s", self._record.path, error)
                warned = True


@contextlib.contextmanager
def held_lease(run_dir: Path, command: str) -> Iterator[Lease]:
    """Hold the lease of a run for the ranks that this process starts: they find its id in their environment. LeaseHeld or
    ValueError, one line, before anything is started."""
    with Lease.acquire(run_dir, command) as lease:
        os.environ.update({LEASE_VARIABLE: lease.id, LAUNCHER_VARIABLE: str(os.getpid())})
        try:
            yield lease
        finally:
            for name in (LEASE_VARIABLE, LAUNCHER_VARIABLE):
                os.environ.pop(name, None)


# ----------------------------------------------------------------------------------------------------------------- the files


def _take(record: LeaseRecord) -> int:
    """Put the record in its place; return its descriptor. LeaseHeld if a living process is there."""
    run_dir = record.path.parent
    mine = record.path.with_name(f".{LEASE}.{record.id}")
    file = os.open(mine, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.write(file, encode(record))
        os.fsync(file)
        for _ in range(_ATTEMPTS):
            present = read_lease(run_dir)
            if present is None:
                with contextlib.suppress(FileExistsError):  # another one was faster
                    os.link(mine, record.path)
                    return file
                continue
            if present.outlives_watch():
                break
            if _replace(mine, record, present):
                return file
        raise _held(run_dir, read_lease(run_dir))
    except BaseException:
        os.close(file)
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):  # it has become lease.json
            mine.unlink()


def _replace(mine: Path, record: LeaseRecord, gone: LeaseRecord) -> bool:
    """Take over from a holder that is gone; False if another process was first."""
    run_dir = record.path.parent
    claim = claim_after(run_dir, gone.id)
    try:
        os.link(mine, claim)
    except FileExistsError:
        return False
    found = read_lease(run_dir)
    if found is None or found.id != record.id:  # a faster one had finished before the claim was made
        claim.unlink()
        return False
    os.replace(mine, record.path)
    for old in run_dir.glob(f".{LEASE}.after-*"):  # only now: before, another one could make it once more
        with contextlib.suppress(FileNotFoundError):
            old.unlink()
    return True


def _make(run_dir: Path) -> tuple[Path, ...]:
    missing = tuple(folder for folder in (run_dir, *run_dir.parents) if not folder.exists())
    run_dir.mkdir(parents=True, exist_ok=True)
    return missing


def _held(run_dir: Path, record: LeaseRecord | None) -> LeaseHeld:
    if record is None:
        return LeaseHeld(f"{run_dir}: other processes take and leave the run at this moment; try again")
    end = f"scancel {record.job}" if record.job is not None else f"kill {record.pid} on {record.host}"
    return LeaseHeld(
        f"{run_dir} is in use by {record.describe()}, seen {max(0, int(record.silent_s()))} s ago: end it first ({end}), use "
        f"another run.name, or remove {record.path} if you know that it is gone"
    )
