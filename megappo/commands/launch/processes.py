"""Processes of the ranks of this machine: started anew, or forked from one that has imported everything (`fork_server.py`)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Pipe
from typing import Any, Protocol

from megappo.runtime.helper_process import deaf_to_stop

MODULE_OPTIONS = ("-P", "-m")
"""Options of Python before a module that it runs. -P: a user's random.py in the working directory must not replace a library's."""


class RankProcess(Protocol):
    """A rank's process. `poll` returns the exit code (negative: the signal that killed it), or None while it runs."""

    pid: int

    def poll(self) -> int | None: ...


class Starter(Protocol):
    """Starts ranks with `environment` over this process's own. Requests to stop wait until a rank listens
    (`runtime/ending.py`)."""

    descriptors: Sequence[int]  # readable when a rank has ended

    def start(self, environment: Mapping[str, str], arguments: Sequence[str]) -> RankProcess: ...


class NewProcesses:
    """Starts every rank as a new interpreter that runs a module."""

    descriptors: Sequence[int] = ()  # SIGCHLD tells instead

    def __init__(self, module: str) -> None:
        self._module = module

    def start(self, environment: Mapping[str, str], arguments: Sequence[str]) -> RankProcess:
        with deaf_to_stop():
            command = [sys.executable, *MODULE_OPTIONS, self._module, *arguments]
            return subprocess.Popen(command, env={**os.environ, **environment})


class ForkedProcesses:
    """Starts ranks as forks of one process, which saves the seconds and the memory of their imports. That process is started here
    and ends with this one or by `close`. preload: modules that it imports."""

    def __init__(self, module: str, preload: Sequence[str]) -> None:
        self._channel, theirs = Pipe()
        command = [
            sys.executable,
            *MODULE_OPTIONS,
            "megappo.commands.launch.fork_server",
            str(theirs.fileno()),
            str(os.getpid()),
            module,
            *preload,
        ]
        with theirs, deaf_to_stop():
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._codes: dict[int, int] = {}
        self._open = True
        self.descriptors: Sequence[int] = (self._channel.fileno(),)

    def unfit(self) -> str | None:
        """Wait for the imports; return why ranks must not be forked after them, or None."""
        reason = self._read()
        return reason if self._open else "it has ended"

    def is_alive(self) -> bool:
        return self._open and self._process.poll() is None

    def start(self, environment: Mapping[str, str], arguments: Sequence[str]) -> RankProcess:
        with contextlib.suppress(ConnectionError):  # has ended, which the read below reports
            self._channel.send((dict(environment), list(arguments)))
        while isinstance(answer := self._read(), tuple):
            self._note(*answer)
        if answer is None:
            raise RuntimeError("the process from which ranks are forked has ended; its message, if any, is above")
        return _Forked(self, answer)

    def close(self) -> None:
        """End the process from which ranks are forked. Its ranks must have ended."""
        self._channel.close()
        self._process.kill()  # it may still be importing after Ctrl-C
        self._process.wait()

    def code_of(self, pid: int) -> int | None:
        """Return the exit code of a rank that was started here; None while it runs."""
        while pid not in self._codes and self._open and self._channel.poll():
            if (answer := self._read()) is not None:
                self._note(*answer)
        # If their parent is gone, the kernel has killed the ranks.
        return self._codes.get(pid, None if self._open else -signal.SIGKILL)

    def _note(self, pid: int, code: int) -> None:
        self._codes[pid] = code

    def _read(self) -> Any:
        try:
            # None once the process has ended.
            return self._channel.recv()
        except (EOFError, ConnectionError):
            self._open = False
            return None


class SharedImports:
    """Starters for worlds one after the other: forks of one process, or new interpreters, with a message, if
    ranks cannot be forked. The process starts with the first world, again if it has ended, and ends with
    `close`. world: its name in the message."""

    def __init__(self, module: str, preload: Sequence[str], world: str) -> None:
        self._module, self._preload, self._world = module, preload, world
        self._forks: ForkedProcesses | None = None
        self._new = False  # ranks cannot be forked here

    def starter(self) -> Starter:
        """Wait for the imports and return the starter of the next world."""
        if self._new:
            return NewProcesses(self._module)
        if self._forks is None or not self._forks.is_alive():
            self.close()
            self._forks = ForkedProcesses(self._module, self._preload)
            if (reason := self._forks.unfit()) is not None:
                print(
                    f"megappo: every {self._world} imports everything again, as ranks cannot be forked: {reason}", file=sys.stderr
                )
                self._new = True
                return NewProcesses(self._module)
        return self._forks

    def close(self) -> None:
        if self._forks is not None:
            self._forks.close()


class _Forked:
    def __init__(self, starter: ForkedProcesses, pid: int) -> None:
        self.pid, self._starter = pid, starter

    def poll(self) -> int | None:
        return self._starter.code_of(self.pid)
