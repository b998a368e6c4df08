"""Ranks under a watchdog that hang in a known way, without a launcher: how they end, when, and what they leave.

A rank is a process forked from the server of `tests/worlds.py`. It runs short steps of two stages that exchange over gloo, until
the limits of their sections are learned, and then the fault.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing as mp
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from tests.worlds import IMPORTED_ONCE

HEARTBEAT_S, STILL_S = 2.0, 6.0
# Hard limit of a world of the tests: ranks that still live are killed, and the test fails.
OUTER_S = 60.0
GRANDCHILD = "import time; time.sleep(300)"
STEPS_BEFORE = 6
ALL = -1  # culprits


def timeouts(fault: str) -> Any:
    """Limits of an exchange (meeting_s, on the host) that come before the watchdog's, or long after."""
    from megappo.config.run_sections import TimeoutsConfig

    meeting_s = HEARTBEAT_S if fault == "sleeping_in_a_pass" else 300.0
    return TimeoutsConfig(start_s=STILL_S, pass_s=STILL_S, meeting_s=meeting_s, heartbeat_s=HEARTBEAT_S)


# ------------------------------------------------------------------------------------------------------------------- faults


def stopped(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)  # it is continued for a moment, so that it writes its stacks


def sleeping(rank: int) -> None:
    time.sleep(1000)


def holding_the_interpreter(rank: int) -> None:
    while True:  # a signal ends one call
        ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the GIL during the call


def in_another_exchange(rank: int) -> None:
    """Waits for a message that the peer, which is in an all-reduce, does not send: the hang of a pipeline."""
    dist.recv(torch.zeros(1), src=0)


def sleeping_in_a_pass(rank: int) -> None:
    """Longer than an exchange may take: the peers' timeouts come before the watchdog's."""
    time.sleep(1000)


def raising(rank: int) -> None:
    raise RuntimeError("the culprit")


def sleeping_at_first(rank: int) -> None:
    """In a stage that has never run: it may last for 300 s."""
    time.sleep(1000)


def slow_at_first(rank: int) -> None:
    """Twice as long as no rank may be at work, with work of every kind, none of it in this rank's own threads for long."""
    for kind in ("compute", "child", "write", "advance"):
        until = time.monotonic() + STILL_S / 2
        child = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) if kind == "child" else None
        with open(os.devnull, "wb") as file:
            while time.monotonic() < until:
                if kind == "compute":
                    sum(range(100_000))
                elif kind == "write":
                    file.write(bytes(2**20))
                    time.sleep(0.05)
                elif kind == "advance":
                    PROGRESS[0]()
                    time.sleep(0.2)
                else:
                    time.sleep(0.2)
        if child is not None:
            child.kill()
            child.wait()


PROGRESS: list[Callable[[], None]] = []
AT_FIRST = ("sleeping_at_first", "slow_at_first")


def healthy(rank: int) -> None:
    """Longer in one place than a rank may be silent, within the limit of the section."""
    time.sleep(HEARTBEAT_S * 1.25)


FAULTS: dict[str, Callable[[int], None]] = {
    one.__name__: one
    for one in (
        stopped,
        sleeping,
        holding_the_interpreter,
        in_another_exchange,
        sleeping_in_a_pass,
        sleeping_at_first,
        slow_at_first,
        raising,
        healthy,
    )
}


def rank_main(
    rank: int, world: int, port: int, folder: str, fault: str, culprit: int, launcher: Mapping[str, str] = MappingProxyType({})
) -> None:
    """launcher: variables that it has set."""
    hangs = culprit in (rank, ALL)
    log = os.open(f"{folder}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    environment = dict(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world, MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in environment.items()}, MASTER_ADDR="127.0.0.1")
    os.environ.update(launcher)
    os.environ["MEGAPPO_ATTEMPT_DIR"] = folder
    torch.set_num_threads(1)

    from megappo.parallel.device import start_distributed
    from megappo.telemetry.timers import StageTimers
    from megappo.trainer.preflight import watched

    start_distributed(torch.device("cpu"), timeouts(fault))
    child = subprocess.Popen([sys.executable, "-S", "-c", GRANDCHILD]) if hangs and fault != "raising" else None
    with watched(timeouts(fault), Path(folder)) as watchdog:
        PROGRESS.append(watchdog.sections.advance)
        begins = 1 if fault in AT_FIRST else STEPS_BEFORE + 1
        for step in range(1, STEPS_BEFORE + 3):
            timers = StageTimers(observer=watchdog.of_step(step))
            with timers.stage("generate"):
                time.sleep(0.02)
            with timers.stage("score"):
                if step == begins and hangs:
                    Path(folder, "fault").write_text(json.dumps([time.time(), child.pid if child else None]))
                    time.sleep(HEARTBEAT_S / 4)  # a sign of life from this section
                    FAULTS[fault](rank)
                dist.all_reduce(torch.ones(1))
        if child is not None:
            child.kill()
            child.wait()
        dist.barrier()
    threads = [thread.name for thread in threading.enumerate() if "watchdog" in thread.name]
    Path(folder, f"finished-{rank}").write_text(repr(threads))
    dist.destroy_process_group()


# -------------------------------------------------------------------------------------------------------------------- world


@dataclass(frozen=True)
class Ended:
    """How a world ended. codes: exit codes of the ranks. seconds: from the fault to the end of the last rank and its children."""

    codes: list[int | None]
    seconds: float
    logs: list[str]
    folder: Path

    def stacks(self, rank: int) -> str:
        path = self.folder / f"rank-{rank}.stacks"
        return path.read_text() if path.exists() else ""

    @property
    def verdict(self) -> dict[str, Any]:
        return json.loads((self.folder / "verdict.json").read_text())


def run_world(folder: Path, world: int, fault: str, culprit: int) -> Ended:
    """Start the ranks and wait for their end, at most OUTER_S."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    ranks = [
        context.Process(target=rank_main, args=(rank, world, port, str(folder), fault, culprit), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + OUTER_S
    try:
        while time.monotonic() < deadline and (any(process.is_alive() for process in ranks) or grandchild_lives(folder)):
            time.sleep(0.05)
        end = time.time()
        codes = [process.exitcode for process in ranks]
        assert not grandchild_lives(folder), "a process that a rank started outlives it"
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
    begin = json.loads((folder / "fault").read_text())[0] if (folder / "fault").exists() else end
    logs = [(folder / f"rank-{rank}.log").read_text() for rank in range(world)]
    return Ended(codes, end - begin, logs, folder)


def grandchild_lives(folder: Path) -> bool:
    path = folder / "fault"
    pid = json.loads(path.read_text() or "[0, null]")[1] if path.exists() else None
    if pid is None or not Path(f"/proc/{pid}").exists():
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"  # its parent may be gone, and nobody waits
