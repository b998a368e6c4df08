"""Commands of `megappo`, scripts, pieces of code and ranks of the launcher in a fork of the server that has imported everything
(`worlds.py`): 4 s of processor time less each."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megappo.commands.launch import fork_server, local, processes, training
from megappo.commands.launch.processes import ForkedProcesses, RankProcess
from megappo.runtime.helper_process import deaf_to_stop
from tests.worlds import IMPORTED_ONCE


def run_command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    """`megappo ARGUMENTS` there, with this process's environment. Ranks that it starts are forks of a child of it."""
    return _forked(_command, ["megappo", *map(str, arguments)], cwd)


def run_script(script: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    """`python SCRIPT ARGUMENTS` there, with this process's environment. The script may find modules imported that it does not
    import itself."""
    return _forked(_script, [str(script), *map(str, arguments)], cwd)


def run_code(code: str, *, cwd: Path) -> subprocess.CompletedProcess:
    """`python -c CODE` there, as `run_script`."""
    return _forked(_code, ["-c", code], cwd)


def start_command(*arguments: object, output: str | Path, errors: str | Path, environment: Mapping[str, str]) -> BaseProcess:
    """`megappo ARGUMENTS` in a session of its own, with this environment and the calls of its AFTER_IMPORT (scripts/after_import).
    Its ranks are in its process group, as ever, and forks of a child of it. output, errors: a terminal, which becomes the
    session's, a named pipe, or a file. The process has started."""
    process = _process(_lead, ["megappo", *map(str, arguments)], str(output), str(errors), dict(environment))
    process.start()
    return process


class ForkedRanks:
    """In place of the launcher's `NewProcesses` and `ForkedProcesses` (`monkeypatch`). What the ranks print is not caught."""

    def __init__(self, module: str, preload: Sequence[str] = ()) -> None:
        self._module = module
        self.descriptors: list[int] = []  # of the ranks that have not ended

    def unfit(self) -> None:
        return None

    def is_alive(self) -> bool:
        return True

    def start(self, environment: Mapping[str, str], arguments: Sequence[str]) -> _ForkedRank:
        return _ForkedRank(_process(_rank, self._module, list(arguments), {**os.environ, **environment}), self.descriptors)

    def close(self) -> None: ...


class _ForkedRank:
    def __init__(self, process: BaseProcess, running: list[int]) -> None:
        process.start()
        assert process.pid is not None, "it has been started"
        self.pid, self._process, self._running = process.pid, process, running
        running.append(process.sentinel)

    def poll(self) -> int | None:
        code = self._process.exitcode
        if code is not None and self._process.sentinel in self._running:
            self._running.remove(self._process.sentinel)
        return code


def _rank(module: str, arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.clear()  # of the server, which is that of its start
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


# Programs of the ranks that a command starts, where that is not the one of `megappo train`.
PROGRAMS = {"verify": "megappo.commands.verify.rank", "tune": "megappo.commands.tune.rank"}


def _command(words: list[str]) -> None:
    from megappo.commands import cli

    ours, theirs = Pipe()
    launcher = os.getpid()
    with theirs, deaf_to_stop():
        if os.fork() == 0:
            ours.close()
            sys.exit(_fork_ranks(os.dup(theirs.fileno()), launcher, PROGRAMS.get(words[1], training.RANK_MODULE)))
    forks = _Forks(ours)
    for home in (local, training):
        setattr(home, "NewProcesses", lambda module: forks)
    setattr(processes, "ForkedProcesses", lambda module, preload: forks)
    sys.exit(cli.main(words[1:]))


def _script(words: list[str]) -> None:
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


def _code(words: list[str]) -> None:
    sys.argv = words[:1]
    sys.path.insert(0, "")
    exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})


def _forked(run: Callable[[list[str]], None], words: list[str], cwd: Path) -> subprocess.CompletedProcess:
    with tempfile.TemporaryDirectory(prefix="command") as folder:
        process = _process(_begin, run, words, folder, dict(os.environ), str(cwd))
        process.start()
        process.join()
        assert process.exitcode is not None, "it has ended"
        return subprocess.CompletedProcess(words, process.exitcode, *(Path(folder, name).read_text() for name in ("out", "err")))


def _process(target: Callable[..., None], *args: object) -> BaseProcess:
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    return context.Process(target=target, args=args)


def _begin(run: Callable[[list[str]], None], words: list[str], folder: str, environment: dict[str, str], cwd: str) -> None:
    _turn_to(Path(folder, "out"), Path(folder, "err"), environment)
    os.chdir(cwd)
    run(words)


def _turn_to(output: str | Path, errors: str | Path, environment: Mapping[str, str]) -> None:
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    # A pipe for both is opened once: who reads it may take its name away as soon as it is open.
    os.dup2(1 if errors == output else os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    os.environ.clear()  # of the server, which is that of its start
    os.environ.update(environment)


class _Forks(ForkedProcesses):
    """The launcher's end of a child that forks ranks; the imports are done."""

    def __init__(self, channel: Connection) -> None:
        self._channel, self._codes, self._open = channel, {}, True
        self.descriptors = (channel.fileno(),)
        assert super().unfit() is None

    def unfit(self) -> None:
        return None  # it has been read

    def is_alive(self) -> bool:
        return self._open

    def start(self, environment: Mapping[str, str], arguments: Sequence[str]) -> RankProcess:
        return super().start({**os.environ, **environment}, arguments)  # the child has the environment of before the command

    def close(self) -> None:
        self._channel.close()


def _lead(words: list[str], output: str, errors: str, environment: dict[str, str]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it, and so would all that they start
    if Path(output).is_char_device():
        os.open(output, os.O_RDWR)  # opened for writing alone, it does not become the session's
    _turn_to(output, errors, environment)
    # As in a process of its own, whose first shared memory starts the tracker.
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None  # type: ignore
    for call in environment.get("AFTER_IMPORT", "").split():
        name, function = call.split("=")
        home, attribute = function.split(":")
        getattr(importlib.import_module(home), attribute)(importlib.import_module(name))
    _command(words)


def _fork_ranks(descriptor: int, launcher: int, program: str) -> int:
    """Fork ranks, and in each of them return its exit code. An error that ends a rank is told as by an interpreter: multiprocessing
    would print it alone, and call no hook of the rank's."""
    try:
        return fork_server.main(descriptor, launcher, program, ())
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
