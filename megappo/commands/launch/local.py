"""Worlds of ranks on this machine: start the ranks, pass requests to stop on to them, end them all when one fails.

The ranks find torchrun's variables, but torchrun's agent is not used: it kills the ranks 30 s after a SIGTERM, inside a step or a
save, and every restart imports everything again. The store through which the ranks meet lives here, on a free port.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from megappo.commands.launch.processes import NewProcesses, RankProcess, SharedImports, Starter
from megappo.runtime.ending import FAILED, KILLED, UNRECOVERABLE, as_shell
from megappo.runtime.failure import (
    ATTEMPT_DIR,
    KILL_GRACE_S,
    Failure,
    first_failure,
    is_joining,
    note_joined,
    note_joining,
    spare_with,
)
from megappo.runtime.life import LAUNCHER_LISTENS, Listener, Store
from megappo.runtime.messages import name_ranks

if TYPE_CHECKING:
    from torch.distributed import TCPStore


_ASKING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# timeout(1) and some supervisors signal a process and then its group: that is one request.
AGAIN_S = 1.0


class Requests:
    """Context in which USR1, TERM, INT and HUP are requests; if ranks are not stoppable, each signal ends them at once. stop: the
    first signal. end: a second one other than USR1, at least AGAIN_S later; the ranks are to be killed."""

    def __init__(self, *, stoppable: bool) -> None:
        self.stop: signal.Signals | None = None
        self.end: signal.Signals | None = None
        self._stoppable = stoppable
        self._insisting_at: float | None = None

    def __enter__(self) -> Requests:
        self._wake, write = os.pipe()
        for end in (self._wake, write):
            os.set_blocking(end, False)
        self._before_wake = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._write = write
        self._before = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, lambda *_: None)}  # wakes `wait`
        for number in _ASKING:
            # nohup and shells ignore HUP and INT of the terminal on purpose; a job script USR1 and TERM until the ranks listen.
            if number in (signal.SIGINT, signal.SIGHUP) and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before_wake)
        os.close(self._wake)
        os.close(self._write)

    def wait(self, seconds: float, others: Sequence[int] = ()) -> None:
        """Sleep until a signal comes, a child ends, or one of the file descriptors `others` is readable."""
        select.select([self._wake, *others], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, 4096):
                pass

    def _received(self, number: int, frame: FrameType | None) -> None:
        received, now = signal.Signals(number), time.monotonic()
        if not self._stoppable:
            self.end = received
        elif number != signal.SIGUSR1 and self._insisting_at is not None and now - self._insisting_at >= AGAIN_S:
            self.end = received
        elif self.stop is None:
            self.stop = received
        if number != signal.SIGUSR1 and self._insisting_at is None:
            self._insisting_at = now


HOST = "127.0.0.1"
_LOOK_S = 1.0  # polling interval; signals and ends of ranks wake at once
_LONGEST_END_S = 60.0  # after SIGKILL, while the driver frees GPU memory


@dataclass(frozen=True)
class WorldEnd:
    """End of all ranks of a world."""

    code: int  # exit code of the command
    failure: Failure | None = None  # of the first rank to fail
    ended_by: signal.Signals | None = None  # signal that ended the ranks at once
    at: float = 0.0  # time.monotonic() of the first failure

    def describe(self) -> str:
        """Describe a failure in one line; empty without one."""
        if self.ended_by is not None:
            return f"ended by {self.ended_by.name}"
        return self.failure.in_one_line() if self.failure is not None else ""


def start_ranks(num_ranks: int, arguments: Sequence[str], module: str = "megappo.commands.cli") -> int:
    """Run `python -m MODULE ARGUMENTS` on `num_ranks` ranks that take no request to stop; return the exit code. Prints one line on
    a failure. Raises ValueError if the machine has GPUs, but fewer than ranks."""
    prepare(num_ranks)
    return _run_alone(NewProcesses(module), num_ranks, arguments)


def start_worlds(worlds: Sequence[tuple[int, Sequence[str]]], module: str, preload: Sequence[str]) -> int:
    """Run worlds of (number of ranks, arguments) as `start_ranks` does, one after the other, with the imports of `preload` shared.
    Returns the first exit code that is not 0; later worlds are not started then."""
    with contextlib.closing(SharedImports(module, preload, "world")) as imports:
        for num_ranks, arguments in worlds:
            prepare(num_ranks)
            if code := _run_alone(imports.starter(), num_ranks, arguments):
                return code
    return 0


def _run_alone(starter: Starter, num_ranks: int, arguments: Sequence[str]) -> int:
    with Requests(stoppable=False) as requests, tempfile.TemporaryDirectory(prefix="megappo-ranks-") as folder:
        end = run_world(starter, num_ranks, arguments, requests, Path(folder))
    say(end)
    return end.code


def prepare(num_ranks: int) -> None:
    """Check the GPUs and give each rank its share of the cores. Raises ValueError if there are too few GPUs."""
    from megappo.parallel.device import check_gpus

    check_gpus(num_ranks)
    # The affinity: Slurm may give the job a few of the machine's cores.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_ranks)))


def say(end: WorldEnd) -> None:
    """Print how the ranks ended, unless all is well."""
    if end.ended_by is not None:
        print(f"megappo: ended by {end.ended_by.name}", file=sys.stderr)
    elif end.failure is not None:
        print(f"megappo: rank {end.failure.rank} ended first, {end.failure.how}; what it said is above", file=sys.stderr)


def run_world(
    starter: Starter,
    num_ranks: int,
    arguments: Sequence[str],
    requests: Requests,
    evidence: Path,
    environment: Mapping[str, str] | None = None,
    rejoins: int = 0,
) -> WorldEnd:
    """Start the ranks and wait for all of them, or for the first failure, which ends the others within KILL_GRACE_S. Spare ranks
    that are killed (`failure.spare_with`) end no other; they start again, `rejoins` times. evidence: folder for
    `failure.first_failure`. environment: further variables of every rank. No rank outlives the call."""
    ranks: dict[int, RankProcess] = {}
    with _meeting_point(num_ranks) as (store, described):
        common = {**described, ATTEMPT_DIR: str(evidence), **(environment or {})}

        def start(rank: int) -> None:
            ranks[rank] = starter.start({**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, arguments)

        try:
            for rank in range(num_ranks):
                start(rank)
            listener = Listener(store, evidence, _LOOK_S)
            return _watch(ranks, starter.descriptors, requests, evidence, listener, _Spares(start, evidence, listener, rejoins))
        finally:
            _kill(ranks)


class _Spares:
    """Ranks that the run goes on without. start: starts a rank. most: how often some start again."""

    def __init__(self, start: Callable[[int], None], evidence: Path, listener: Listener, most: int) -> None:
        self._start, self._evidence, self._listener, self._most = start, evidence, listener, most
        self._count = 0
        self._lost: dict[int, float] = {}  # rank -> when its end was noticed, by `time.monotonic`

    def lose(self, rank: int, code: int) -> bool:
        """Return True if a rank that has ended is lost, and no other ends with it."""
        is_lost = is_joining(self._evidence, rank) or (code < 0 and bool(spare_with(self._evidence, rank)))
        if is_lost:
            note_joined(self._evidence, [rank])  # it joins no more
            _note_exit(self._evidence, rank, as_shell(code), "lost")
            self._lost[rank] = time.monotonic()
        return is_lost

    def end_others(self, running: Mapping[int, RankProcess]) -> None:
        """Kill what is left of replicas that have lost a rank. It may wait within a kernel that exchanges values for one that never
        comes: vLLM's in shared memory, as NCCL's, ask for no end of the other side."""
        waited = [rank for rank, since in self._lost.items() if time.monotonic() - since > KILL_GRACE_S]
        left = {other for rank in waited for other in spare_with(self._evidence, rank)} & running.keys()
        _send([running[rank] for rank in left], signal.SIGKILL)

    def start_again(self, running: Collection[int]) -> list[int]:
        """Start lost ranks whose replica has ended; return them."""
        replicas = [spare_with(self._evidence, rank) for rank in sorted(self._lost)]
        together = next((ranks for ranks in replicas if ranks and not set(ranks) & set(running)), [])
        if not together or self._count == self._most:
            return []
        self._count += 1
        said = f"{name_ranks(together)} will take part again: start {self._count} of {self._most}"
        print(f"megappo: {said}", file=sys.stderr, flush=True)
        for rank in together:
            self._lost.pop(rank, None)
            self._listener.forget(rank)
            note_joining(self._evidence, rank, self._count)
            self._start(rank)
        return together


def _watch(
    ranks: Mapping[int, RankProcess],
    descriptors: Sequence[int],
    requests: Requests,
    evidence: Path,
    listener: Listener,
    spares: _Spares,
) -> WorldEnd:
    running, codes, failed_at, killed, handed_on = dict(ranks), {}, 0.0, False, False
    # Ranks that have not come to take part are not waited for.
    while running and not all(is_joining(evidence, rank) for rank in running):
        for rank, process in list(running.items()):
            if (code := process.poll()) is None:
                continue
            del running[rank]
            if spares.lose(rank, code):
                continue
            codes[rank] = as_shell(code)
            if code != 0:
                failed_at = failed_at or time.monotonic()
                killed = killed or codes[rank] == KILLED
                _note_exit(evidence, rank, codes[rank])
        if not failed_at and requests.stop is None:
            running |= {rank: ranks[rank] for rank in spares.start_again(running)}
        if requests.end is not None:
            return WorldEnd(128 + requests.end, ended_by=requests.end)
        if requests.stop is not None and not handed_on:
            handed_on = True
            print(f"megappo: {requests.stop.name}: {_STOPPING}", file=sys.stderr, flush=True)
            _send(running.values(), signal.SIGUSR1)
        # The others may wait for the dead rank forever. Give them two seconds for tracebacks, unless it was killed from outside.
        if failed_at and (killed or time.monotonic() - failed_at > KILL_GRACE_S):
            break
        spares.end_others(running)
        listener.end_silent((rank, process.pid) for rank, process in running.items())
        requests.wait(KILL_GRACE_S / 10 if failed_at else _LOOK_S, descriptors)
    if not failed_at:
        return WorldEnd(0)
    failure = first_failure(evidence, KILL_GRACE_S)
    assert failure is not None, "a rank failed and its exit code was noted"
    code = failure.code or FAILED
    # An unrecoverable code wins, even if a rank that lost its peer ended first.
    return WorldEnd(UNRECOVERABLE if UNRECOVERABLE in codes.values() else code, failure, at=failed_at)


_STOPPING = "the ranks finish their step, save and end; SIGTERM or Ctrl-C once more ends them at once"


def loopback_store() -> TCPStore:
    """Serve a store for the processes of this machine, on a free port (`store.port`) of 127.0.0.1."""
    from torch.distributed import TCPStore

    # torch's own socket would listen on all interfaces, whatever the address.
    with socket.socket() as listening:
        listening.bind((HOST, 0))
        listening.listen(socket.SOMAXCONN)
        port = listening.getsockname()[1]
        return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


@contextlib.contextmanager
def _meeting_point(num_ranks: int) -> Iterator[tuple[Store, dict[str, str]]]:
    # Here and not in rank 0: the system chooses a free port, and the store outlives every rank.
    store = loopback_store()
    yield (
        store,
        {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_RUN_ID": "megappo",  # tells a process that a launcher started it as a rank
            # For torch.distributed.rendezvous: the store exists already.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            LAUNCHER_LISTENS: "1",
        },
    )
    del store


def _note_exit(evidence: Path, rank: int, code: int, kind: str = "exit") -> None:
    (evidence / f"rank-{rank}.{kind}").write_text(f"{code} {time.time_ns()} 0 {socket.gethostname()}\n", encoding="utf-8")


def _send(processes: Iterable[RankProcess], number: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(process.pid, number)


def _kill(ranks: Mapping[int, RankProcess]) -> None:
    _send(ranks.values(), signal.SIGKILL)
    deadline = time.monotonic() + _LONGEST_END_S
    while any(process.poll() is None for process in ranks.values()):
        if time.monotonic() > deadline:
            left = [rank for rank, process in ranks.items() if process.poll() is None]
            raise RuntimeError(f"ranks {left} do not end {_LONGEST_END_S:g} s after SIGKILL (a driver that hangs?)")
        time.sleep(0.01)
