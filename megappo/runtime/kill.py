"""End of a process that hangs, from outside: its stacks first, then SIGKILL for it and all that it started. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil

# Dumps the stacks of a process whose interpreter is blocked, or that was stopped; Slurm and torch use other signals.
DUMP_SIGNAL = signal.SIGUSR2
_DUMP_S = 0.3


def dump_stacks_of(pid: int) -> None:
    """Let a rank write its stacks, even if it was stopped or its interpreter is blocked."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, DUMP_SIGNAL)
        os.kill(pid, signal.SIGCONT)
        time.sleep(_DUMP_S)


def kill_with_children(pid: int) -> None:
    """SIGKILL a process after all that it started: a reward's worker, a compiler."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for started in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(started.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
