"""Signs of life from ranks to the launcher on their machine, which ends a rank whose own watchdog can no longer run. Ranks watch
each other (`watchdog.py`), but a rank alone in its world, or a world whose interpreters are all blocked by C code, has only the
launcher. Also how a hung process is ended from outside: stacks first, then SIGKILL. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import psutil

from megappo.runtime.sections import AwakeClock, Where
from megappo.runtime.verdict import LAUNCHER, Member, Verdict, judge, record_verdict

# Dumps the stacks of a process whose interpreter is blocked, or that was stopped; Slurm and torch use other signals.
DUMP_SIGNAL = signal.SIGUSR2
_DUMP_S = 0.3


def dump_stacks_of(pid: int) -> None:
    """Make a rank write its stacks, even if it was stopped or its interpreter is blocked."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, DUMP_SIGNAL)
        os.kill(pid, signal.SIGCONT)
        time.sleep(_DUMP_S)


def kill_with_children(pid: int) -> None:
    """SIGKILL all that a process started (a reward's worker, a compiler), then the process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for started in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(started.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# What a process at rest stays below: its threads still beat, and ranks that wait for each other meet every second.
_REST_SHARE, _REST_BYTES_PER_S = 0.1, 32 * 1024


class WorkMeter:
    """Tells if this process, or one that it started, works: it uses the processor, reads or writes files, or waits for a disk or a
    processor. Ask from one thread, whose own work does not count. every_s: between two looks, each of which costs some 10 ms."""

    def __init__(self, every_s: float, clock: AwakeClock) -> None:
        self._every_s, self._clock = every_s, clock
        self._at, self._seconds, self._bytes = clock.now(), 0.0, 0

    def has_worked(self) -> bool:
        """True if it did since the look before, or the system does not tell; False if not, or if it is too early to look."""
        passed = self._clock.now() - self._at
        if passed < self._every_s:
            return False
        try:
            seconds, moved, is_busy = _work_of_processes()
        except (OSError, ValueError):  # no /proc as Linux has it, or a name that is no text
            return True
        used, new = seconds - self._seconds, moved - self._bytes
        self._at, self._seconds, self._bytes = self._clock.now(), seconds, moved
        return is_busy or used > _REST_SHARE * passed or new > _REST_BYTES_PER_S * passed


def _work_of_processes() -> tuple[float, int, bool]:
    """Return processor seconds and bytes read and written so far, without this thread's, and if a process waits for a disk or runs.
    The seconds of one that waits for a busy processor are few, and the bytes of one that waits until a disk has them are none."""
    me, seconds, moved, is_busy = psutil.Process(), 0.0, 0, False
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError):  # it has just ended
            seconds += sum(process.cpu_times()[:4])  # also of the children that it has waited for
            moved += _bytes_of(Path(f"/proc/{process.pid}/io"))
            states = {int(task.name): _state(task) for task in Path(f"/proc/{process.pid}/task").iterdir()}
            # Of threads that run only the first counts: others beat, and on a busy machine wait for it.
            is_busy = is_busy or states[process.pid] == "R" or "D" in states.values()
    return seconds - time.thread_time(), moved - _bytes_of(Path("/proc/thread-self/io")), is_busy


def _bytes_of(io: Path) -> int:
    fields = dict(line.split(": ") for line in io.read_text(encoding="utf-8").splitlines())
    return int(fields["rchar"]) + int(fields["wchar"])


def _state(task: Path) -> str:
    return (task / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


LAUNCHER_LISTENS = "MEGAPPO_LAUNCHER_LISTENS"  # set for ranks whose launcher reads their signs of life
_DONE = b"done"


class Store(Protocol):
    """The methods of `torch.distributed.Store` that are used here."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class SignOfLife:
    """Sign of life of one rank. limit_s: silence after which the launcher ends it. head_start_s: more of it, for the other ranks to
    end it, while one of them gives signs. store: not wrapped in a prefix."""

    def __init__(self, store: Store, rank: int, limit_s: float, head_start_s: float) -> None:
        self._store, self._key, self._beats = store, _key(rank), 0
        self._limits = {"limit_s": limit_s, "head_start_s": head_start_s}

    def give(self, where: Where) -> None:
        """Send a sign without waiting: the store does not answer a `set`."""
        self._beats += 1
        sign = {"beat": self._beats, **self._limits, "where": vars(where)}
        with contextlib.suppress(Exception):  # DistNetworkError: the launcher is gone, and the kernel ends this rank
            self._store.set(self._key, json.dumps(sign))

    def end(self) -> None:
        with contextlib.suppress(Exception):
            self._store.set(self._key, _DONE.decode())


class Listener:
    """The launcher's side. Call `end_silent` about every `interval_s`."""

    def __init__(self, store: Store, folder: Path, interval_s: float) -> None:
        self._store, self._folder, self._clock = store, folder, AwakeClock(interval_s)
        self._heard: dict[int, tuple[bytes, float]] = {}

    def forget(self, rank: int) -> None:
        """Forget a rank that has ended, as it starts again."""
        self._store.set(_key(rank), _DONE.decode())

    def end_silent(self, pids: Iterable[tuple[int, int]]) -> None:
        """Dump the stacks of ranks that were silent beyond their limit, kill them, and record the verdict. pids: rank -> pid."""
        self._clock.tick()
        now, running = self._clock.now(), dict(pids)
        late: dict[int, tuple[dict[str, Any], float]] = {}
        for rank in running:
            if not self._store.check([_key(rank)]):
                continue  # loading: it has not begun to give signs
            sign = self._store.get(_key(rank))
            if sign != self._heard.get(rank, (b"", 0.0))[0]:
                self._heard[rank] = sign, now
            silent_s = now - self._heard[rank][1]
            if sign != _DONE and silent_s > (last := json.loads(sign))["limit_s"]:
                late[rank] = last, silent_s
        # A rank that still gives signs ends the late ones itself, and knows more.
        waits = len(late) < len(running)
        for rank, (last, silent_s) in late.items():
            if silent_s > last["limit_s"] + (last["head_start_s"] if waits else 0.0):
                self._end(Member.of_process(rank, running[rank]), Where(**last["where"]), silent_s)

    def _end(self, member: Member, last: Where, silent_s: float) -> None:
        why = f"no sign of life of rank {member.rank} for {silent_s:.0f} s"
        verdict = Verdict.now(member.rank, why, by=LAUNCHER)
        report = judge(verdict, [member], {}, self._folder, {member.rank: last})
        dump_stacks_of(member.pid)
        kill_with_children(member.pid)
        with contextlib.suppress(OSError):  # a full disk must not keep the rank alive
            record_verdict(self._folder, report, verdict, [member])
        sys.stderr.write(report.text)


def _key(rank: int) -> str:
    return f"megappo.life/{rank}"
