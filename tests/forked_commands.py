"""Commands of `megappo`, scripts, pieces of code and ranks of the launcher in a fork of the server that has imported everything
(`worlds.py`): 4 s of processor time less each."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.worlds import IMPORTED_ONCE


def run_command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    """`megappo ARGUMENTS` there, with this process's environment."""
    return _forked(_command, ["megappo", *map(str, arguments)], cwd)


def run_script(script: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    """`python SCRIPT ARGUMENTS` there, with this process's environment. The script may find modules imported that it does not
    import itself."""
    return _forked(_script, [str(script), *map(str, arguments)], cwd)


def run_code(code: str, *, cwd: Path) -> subprocess.CompletedProcess:
    """`python -c CODE` there, as `run_script`."""
    return _forked(_code, ["-c", code], cwd)


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


def _command(words: list[str]) -> None:
    from megappo.commands import cli

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
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(cwd)
    os.environ.clear()  # of the server, which is that of its start
    os.environ.update(environment)
    run(words)
