"""Commands of `megappo` in a fork of the server that has imported everything (`worlds.py`): 4 s of processor time less each."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.worlds import IMPORTED_ONCE


def _run(arguments: list[str], folder: str, environment: dict[str, str], cwd: str) -> None:
    from megappo import cli

    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(cwd)
    os.environ.clear()  # of the server, which is that of its start
    os.environ.update(environment)
    sys.exit(cli.main(arguments))


def run_command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    """`megappo ARGUMENTS` there, with this process's environment."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    words = [str(word) for word in arguments]
    with tempfile.TemporaryDirectory(prefix="command") as folder:
        process = context.Process(target=_run, args=(words, folder, dict(os.environ), str(cwd)))
        process.start()
        process.join()
        assert process.exitcode is not None, "it has ended"
        return subprocess.CompletedProcess(
            ["megappo", *words], process.exitcode, *(Path(folder, name).read_text() for name in ("out", "err"))
        )
