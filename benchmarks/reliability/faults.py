"""Faults that are put into a live run from outside, and what a run has to make of each.

A fault of FATAL ends the world: the launcher restarts all ranks from the newest valid checkpoint. The others must not: the run goes
on with the same processes.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.reliability.live import LiveRun, is_gone

# Seconds for which a late rank or a disk stands still, if a watchdog's limit for the silence of a rank is not near.
LATE_S = (2.0, 5.0)
# Bytes that a process may still write to a file of a "full" disk. 0 would stop even an empty file's first byte of log.
FULL_DISK_BYTES = 1024
# Most steps that a fault of several steps (a full disk, a lost directory) may wait for.
STEP_LIMIT_S = 120.0


@dataclass(frozen=True)
class Target:
    """Where a fault goes. rank: the victim. save_every: steps between checkpoints. heartbeat_s: the watchdog's limit for silence.
    notes: folder that ranks look into.
    """

    live: LiveRun
    ranks: dict[int, psutil.Process]
    rank: int
    save_every: int
    heartbeat_s: float
    notes: Path
    rng: random.Random

    def late_s(self) -> float:
        """Seconds for which to be late."""
        return min(self.rng.uniform(*LATE_S), 0.5 * self.heartbeat_s)

    @property
    def victim(self) -> psutil.Process:
        return self.ranks[self.rank]


class NotInjected(RuntimeError):
    """The run did not get to where the fault could be put in."""


def kill_rank(target: Target) -> str:
    target.victim.send_signal(signal.SIGKILL)
    return f"SIGKILL of rank {target.rank}"


def stop_rank(target: Target) -> str:
    target.victim.send_signal(signal.SIGSTOP)
    return f"SIGSTOP of rank {target.rank}"


def delay_rank(target: Target) -> str:
    seconds = target.late_s()
    target.victim.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    target.victim.send_signal(signal.SIGCONT)
    return f"rank {target.rank} stood still for {seconds:.1f} s"


def raise_on_rank(target: Target) -> str:
    (target.notes / f"raise-{target.rank}").touch()
    return f"exception on rank {target.rank}"


def spoil_gradients(target: Target) -> str:
    """NaN in one rank's gradients, then a kill: the skipped update has to be undone with the steps since the last checkpoint."""
    live, before = target.live, len(target.live.rows)
    (target.notes / f"nan-{target.rank}").touch()
    skipped = live.watch(lambda: next((row for row in live.rows[before:] if row.skipped), None), STEP_LIMIT_S)
    if skipped is None:
        raise NotInjected(f"NaN in the gradients of rank {target.rank}: no step with a skipped update was logged")
    kill_rank(target)
    return f"NaN on rank {target.rank}: step {skipped.step} skipped an update on all ranks; then SIGKILL"


def flip_a_bit(target: Target) -> str:
    """A bit of the newest checkpoint's largest file, then a kill, so that it matters."""
    step = target.live.checkpoints.steps()[0]
    place = target.live.checkpoints.step_path(step)
    path = max((file for file in place.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    at, bit = target.rng.randrange(path.stat().st_size), target.rng.randrange(8)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
    kill_rank(target)
    return f"bit {bit} of byte {at} of step-{step}/{path.relative_to(place)} flipped; then SIGKILL of rank {target.rank}"


def fill_disk(target: Target) -> str:
    """No file of one rank, or of its helpers, may grow past FULL_DISK_BYTES until a save has failed."""
    with contextlib.ExitStack() as restored:
        for process in (target.victim, *target.victim.children(recursive=True)):
            restored.enter_context(_file_size_limit(process.pid))
        step = _past_a_save(target)
    return f"rank {target.rank} could not write until step {step}"


def slow_disk(target: Target) -> str:
    """The disk hangs in the midst of a save: the process that writes the rank's part of it stands still for some seconds."""
    live, seconds = target.live, target.late_s()
    begun = live.watch(lambda: any(live.checkpoints.path.glob(".tmp-step-*")) and live.writers(target.rank), STEP_LIMIT_S)
    if not begun:
        raise NotInjected(f"no process of rank {target.rank} writes checkpoints: saves are not asynchronous")
    for writer in begun:
        writer.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    for writer in begun:
        writer.send_signal(signal.SIGCONT)
    return f"the writer of rank {target.rank} stood still for {seconds:.1f} s in a save"


def lose_directory(target: Target) -> str:
    """The directory of checkpoints is gone, as after a lost mount, until a save was due; what was written meanwhile is hidden."""
    path = target.live.checkpoints.path
    away, meanwhile = path.with_name(path.name + ".lost"), path.with_name(path.name + ".meanwhile")
    path.rename(away)
    try:
        step = _past_a_save(target)
    finally:
        if path.exists():
            path.rename(next(free for n in range(1, 10_000) if not (free := meanwhile.with_name(f"{meanwhile.name}{n}")).exists()))
        away.rename(path)
    return f"checkpoints/ was away until step {step}"


def kill_launcher(target: Target) -> str:
    target.live.launcher.send_signal(signal.SIGKILL)
    return "SIGKILL of the launcher"


FATAL: dict[str, Callable[[Target], str]] = {
    "kill": kill_rank,
    "stop": stop_rank,
    "raise": raise_on_rank,
    "nan": spoil_gradients,
    "corrupt": flip_a_bit,
    "launcher": kill_launcher,
}
HARMLESS: dict[str, Callable[[Target], str]] = {
    "late": delay_rank,
    "full": fill_disk,
    "slow": slow_disk,
    "lost": lose_directory,
}
KINDS = FATAL | HARMLESS
OF_TRAINING = ("nan", "slow")
"""Kinds for ranks that train; those of a rollout half have neither gradients nor a part of a checkpoint."""
MEANING = {
    "kill": "SIGKILL of a rank",
    "stop": "SIGSTOP of a rank",
    "raise": "an exception on one rank",
    "nan": "NaN in one rank's gradients, once",
    "corrupt": "a flipped bit in the newest checkpoint",
    "launcher": "SIGKILL of the launcher, then --resume",
    "late": "a rank that stands still for seconds",
    "full": "a full disk on one rank",
    "slow": "a disk that hangs for seconds in a save",
    "lost": "the directory of checkpoints away for a while",
}


def is_ready(kind: str, live: LiveRun, save_every: int) -> bool:
    """True if the fault can be put in now and matters."""
    if kind == "corrupt":
        return len(live.checkpoints.steps()) > 1  # there must be another one to fall back to
    if kind == "nan":
        return live.step % save_every == 0  # the next save is far enough away: it would keep the skipped update
    return bool(live.checkpoints.steps()) if kind in ("full", "slow", "lost") else True


def survivors(ranks: dict[int, psutil.Process]) -> list[int]:
    """Ranks of a former world that still run."""
    return [rank for rank, process in ranks.items() if not is_gone(process)]


def _past_a_save(target: Target) -> int:
    """Wait until a save was due and one more step has been logged; returns that step."""
    live, start = target.live, target.live.step
    due = (start // target.save_every + 1) * target.save_every + 1
    reached = live.watch(lambda: live.step >= due or live.exit_code is not None or None, STEP_LIMIT_S)
    if reached is None or live.exit_code is not None:
        raise NotInjected(f"the run did not get from step {start} to step {due}")
    return live.step


@contextlib.contextmanager
def _file_size_limit(pid: int) -> Iterator[None]:
    """Make writes past FULL_DISK_BYTES fail (EFBIG) in a process; the former limit comes back."""
    former = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, former[1]))
    try:
        yield
    finally:
        if os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, former)
