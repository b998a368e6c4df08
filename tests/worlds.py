"""Small gloo worlds for tests: start n processes, run one function on every rank, collect what the ranks return.

Ranks are forked from a server that has imported torch, Megatron and the trainer once (seconds of processor time for each rank
otherwise). What else a module's function needs is imported in every rank, so a test module starts few worlds and runs many cases
in each.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d
from torch.multiprocessing.spawn import start_processes

from megappo.commands.launch.local import loopback_store
from megappo.runtime.libraries import collect_seldom, freeze_imports

IMPORTED_ONCE = ["tests.imported_once"]


class WorldError(AssertionError):
    """A rank failed or the world ran past its time; the text holds the traceback that came first."""


def _rank_main(
    rank: int, fn: Callable, world_size: int, folder: str, port: int, timeout_s: float, environment: dict[str, str], args: tuple
) -> None:
    _begin_rank(environment)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=timeout_s)),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = fn(rank, *args)
        Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        # The parent reads the earliest file: peers of the rank that failed first die of closed connections.
        Path(folder, f"failed{rank}").write_text(f"{time.time_ns()}\n{traceback.format_exc()}")
        sys.stdout.flush()
        os._exit(1)


def _calm_gloo() -> None:
    """Give way in the threads that receive for gloo: they spin while another thread has a connection's lock, which waits for a core
    where ranks are more than cores (a third of the processor time of a world of four)."""
    make = distributed_c10d._new_process_group_helper
    looks: dict[str, int] = {}  # at each thread: twice, as it names itself after its start; 36 groups have a hundred of them

    def make_and_calm(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        for thread in os.listdir("/proc/self/task"):
            looks[thread] = looks.get(thread, 0) + 1
            if looks[thread] > 2:
                continue
            with contextlib.suppress(OSError):  # it has ended
                if Path("/proc/self/task", thread, "comm").read_text() == "gloo_tcp_loop\n":
                    # Behind everything else: at nice 19 they still took a sixth of that time.
                    os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
        return made

    distributed_c10d._new_process_group_helper = make_and_calm


def _first_failure(folder: str, world_size: int) -> str:
    failures = []
    for rank in range(world_size):
        path = Path(folder, f"failed{rank}")
        if path.exists():
            stamp, text = path.read_text().split("\n", 1)
            failures.append((int(stamp), rank, text))
    if not failures:
        return "a rank died without a traceback (killed, or out of memory)"
    _, rank, text = min(failures)
    return f"rank {rank} failed first:\n{text}"


def spawn_world(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 900.0, method: Sequence[str] = ()
) -> list[Any]:
    """Run `fn(rank, *args)` on every rank of a new gloo world; returns the ranks' results, which must be picklable.

    `fn` is a module-level function. method: of each rank, by default "forkserver"; "spawn" for one that has imported nothing.
    Raises WorldError with the first traceback, or after `timeout_s` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="world") as folder:
        contexts: list[Any] = [mp.get_context(name) for name in method or ["forkserver"] * world_size]
        mp.get_context("forkserver").set_forkserver_preload(IMPORTED_ONCE)
        # A store in memory: through a file, which every rank polls, groups take three to eight times as long to build.
        store = loopback_store()
        common = (fn, world_size, folder, store.port, timeout_s, dict(os.environ), args)
        processes = [one.Process(target=_rank_main, args=(rank, *common), daemon=True) for rank, one in enumerate(contexts)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        try:
            while any(p.is_alive() for p in processes):
                if any(p.exitcode not in (None, 0) for p in processes):
                    time.sleep(0.5)  # let a rank that failed at the same moment write its traceback
                    raise WorldError(_first_failure(folder, world_size))
                if time.monotonic() > deadline:
                    alive = [rank for rank, p in enumerate(processes) if p.is_alive()]
                    raise WorldError(f"world of {world_size} ran past {timeout_s:.0f} s; ranks {alive} still run")
                time.sleep(0.05)
            if any(p.exitcode for p in processes):
                raise WorldError(_first_failure(folder, world_size))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(world_size)]


def start_forked(fn: Callable[..., None], args: tuple, nprocs: int, start_method: str = "spawn") -> None:
    """As `torch.multiprocessing.spawn` and `start_processes`, whose place it takes in the tests of a script (`mock.patch`), but
    forked from the server: 4 s of processor time less for each rank.
    """
    mp.get_context("forkserver").set_forkserver_preload(IMPORTED_ONCE)  # the context that start_processes takes
    start_processes(_in_environment, (dict(os.environ), fn, args), nprocs, start_method="forkserver")


def _in_environment(rank: int, environment: dict[str, str], fn: Callable[..., None], args: tuple) -> None:
    _begin_rank(environment)
    fn(rank, *args)


def _begin_rank(environment: dict[str, str]) -> None:
    freeze_imports()
    collect_seldom()  # what many runs in one process make
    _calm_gloo()
    os.environ.clear()  # of the server, which is that of its start
    os.environ.update(environment)
