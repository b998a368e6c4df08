"""Helper processes of a rank, and processes that end with their parent.

A request to stop reaches the whole process group, and is the rank's own business. A helper that died of it would cost the rank its
reward or its checkpoint. It ends with its rank: its input ends, or the kernel kills it. Imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator

# TERM and USR1 ask for a checkpoint and the end; INT and HUP come from the terminal and are the launcher's; USR2 asks the ranks
# for their stacks (`kill.DUMP_SIGNAL`).
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2})
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextlib.contextmanager
def deaf_to_stop() -> Iterator[None]:
    """Context in which to start processes that no request to stop may end: they inherit the block, from their first instruction on.

    A signal that comes meanwhile waits for the end of the context.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def parent_to_follow() -> int:
    """Process id for `end_with` of a helper that is started here; 0 if the helper must not follow.

    The kernel follows the thread that starts a helper, not its process: only the main thread lives as long as the rank.
    """
    return os.getpid() if threading.current_thread() is threading.main_thread() else 0


def end_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, ends; at once if it has ended. Does nothing for 0."""
    if not parent or sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
