"""Sandboxes for tests, and what is seen of their processes from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil
import pytest

from megappo.rewards.sandbox.box import Limits, Outcome, Sandbox, reason_against

# The name of a process is seen from outside in /proc, whatever namespaces it is in.
NAME = "import ctypes; ctypes.CDLL(None).prctl(15, {name!r}.encode(), 0, 0, 0)\n"


@cache
def _reason() -> str | None:
    return reason_against(Limits())


def need_isolation() -> None:
    """Skip where the machine has no namespaces for this user: there the refusal is all there is to test."""
    if (reason := _reason()) is not None:
        pytest.skip(f"no sandbox on this machine: {reason}")


def run_code(source: str, stdin: str = "", *, limit_s: float = 20.0, limits: Limits | None = None) -> Outcome:
    """Run a program in a sandbox of its own."""
    with Sandbox(limits or Limits()) as sandbox:
        return sandbox.run(stdin, {"kind": "stdin", "setup": "", "source": source}, limit_s)


@dataclass
class Seen:
    """Most processes of a name at one time, and the most memory of one of them."""

    processes: int = 0
    rss_mib: float = 0.0
    pids: set[int] = field(default_factory=set)


def processes_named(name: str) -> list[psutil.Process]:
    found = []
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text().strip() == name:
                found.append(psutil.Process(int(comm.parent.name)))
        except (OSError, psutil.NoSuchProcess):
            pass  # it has ended
    return found


@contextmanager
def watched(name: str) -> Iterator[Seen]:
    """Look at the processes of this name all the time."""
    seen, over = Seen(), threading.Event()

    def look() -> None:
        while not over.is_set():
            found = processes_named(name)
            seen.processes = max(seen.processes, len(found))
            for process in found:
                seen.pids.add(process.pid)
                try:
                    seen.rss_mib = max(seen.rss_mib, process.memory_info().rss / 2**20)
                except psutil.NoSuchProcess:
                    pass
            time.sleep(0.02)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
