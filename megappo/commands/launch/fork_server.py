"""The process from which ranks are forked: `python -m megappo.commands.launch.fork_server SOCKET LAUNCHER PROGRAM MODULE...`.

It imports the modules once, then only forks, so that a rank, restarted or not, starts in milliseconds. Messages: a reason not to
fork, or None; then for each (environment, arguments) the rank's process id, and (process id, exit code) when it ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from megappo.runtime.helper_process import end_with
from megappo.runtime.libraries import freeze_imports, quiet_libraries


def reason_not_to_fork() -> str | None:
    """Return why a fork of this process might hang or fail; None if nothing speaks against it."""
    # Neither a thread nor an open GPU survives a fork.
    if (threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        return f"its imports have started {threads - 1} threads"
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            if (device := os.readlink(descriptor)).startswith("/dev/nvidia"):
                return f"its imports have opened {device}"
    return None


def serve(connection: Connection) -> list[str] | None:
    """Fork a rank for every request. Returns the rank's arguments in the rank, and None in the server once the launcher is gone."""
    wake, write = os.pipe()
    for end in (wake, write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable = wait([connection, wake])
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 4096)
        _report_ends(connection)
        if connection not in readable:
            continue
        try:
            environment, arguments = connection.recv()
        except (EOFError, ConnectionResetError):  # reset: it left the end of a rank unread
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (wake, write):
                os.close(descriptor)
            connection.close()
            os.environ.update(environment)
            return arguments
        connection.send(pid)


def _report_ends(connection: Connection) -> None:
    with contextlib.suppress(ChildProcessError):  # there is none
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            pid, status = ended
            with contextlib.suppress(BrokenPipeError):  # the launcher is gone
                connection.send((pid, os.waitstatus_to_exitcode(status)))


def main(descriptor: int, launcher: int, program: str, modules: Sequence[str]) -> int:
    """Return the exit code of the server; a rank ends with that of its program."""
    end_with(launcher)
    quiet_libraries()
    for name in modules:
        importlib.import_module(name)
    freeze_imports()  # the collector then leaves these pages shared between ranks
    connection = Connection(descriptor)
    unfit = reason_not_to_fork()
    connection.send(unfit)
    arguments = serve(connection) if unfit is None else None
    if arguments is None:
        return 0
    import numpy

    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"megappo rank {os.environ['RANK']}", encoding="ascii")  # as ps shows it
    numpy.random.seed()  # all forks have the same state; Python's own generator does this by itself
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
