"""A sandbox as a rank holds it: start the supervisor, hand it one test after the other, end it. Threads may hold one each."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import megappo
from megappo.rewards.sandbox.root_folder import WORK
from megappo.runtime.helper_process import deaf_to_stop
from megappo.runtime.life import kill_with_children

OUTPUT_BYTES = 1 << 20  # of stdout, and of any file that the code writes
_RUNNER = Path(__file__).with_name("runner.py")
_START = "import sys; sys.path.insert(0, sys.argv[1]); from megappo.rewards.sandbox import supervisor; supervisor.main()"
_START_S = 60.0  # an idle machine takes 0.03 s
_GRACE_S = 1.5  # by which the supervisor may answer late before it is killed too
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class SandboxError(RuntimeError):
    """A sandbox could not be made, or a program not be started in it: a fault of the machine, not of the code."""


@dataclass(frozen=True)
class Limits:
    """Limits of a sandbox. memory_mib: address space of each process. packages: if the code may import this run's packages.

    isolated: no network, no files but the interpreter's, no processes but its own; needs namespaces. Otherwise the
    code has the rights of the rank's user, less its environment.
    """

    memory_mib: int = 512
    max_processes: int = 8
    packages: bool = False
    isolated: bool = True


@dataclass(frozen=True)
class Outcome:
    """End of one test. status: `exit CODE`, `signal NUMBER`, `timeout`, `output` (too much) or `lost` (the supervisor died).

    stdout: at most `OUTPUT_BYTES`. report: text that the runner wrote, or the code in its stead.
    """

    status: str
    stdout: str = ""
    report: str = ""


class Sandbox:
    """Place to run the code of one response; a context manager, whose end leaves no process behind."""

    def __init__(self, limits: Limits) -> None:
        """SandboxError, one line: the machine refuses what `limits` needs."""
        self._folder = None if limits.isolated else tempfile.mkdtemp(prefix="megappo-code-")
        self._received = b""
        command = [sys.executable, "-E", "-s", "-S", "-P", "-c", _START, str(Path(megappo.__file__).parents[1])]
        with deaf_to_stop():  # a request to stop is the rank's business: its step still needs this score
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", env=_library_path(), bufsize=0
            )
        try:
            self._send(_settings(limits, self._folder))
            answer = self._receive(_START_S)
            if answer is None:
                raise SandboxError(f"the sandbox's supervisor did not start: code {self._process.poll()}")
            if "error" in answer:
                raise SandboxError(answer["error"])
        except BaseException:
            self.close()
            raise

    def run(self, stdin: str, task: Mapping[str, Any], limit_s: float) -> Outcome:
        """Run one test in processes of its own. task: what `runner.py` reads. SandboxError: nothing could be started."""
        started = time.monotonic()
        self._send({"stdin": stdin, "task": json.dumps(task), "limit_s": limit_s})
        answer = self._receive(limit_s + _GRACE_S)
        if answer is None:
            return Outcome("timeout" if time.monotonic() - started >= limit_s else "lost")
        if "error" in answer:
            raise SandboxError(answer["error"])
        return Outcome(**answer)

    def close(self) -> None:
        """End every process of the sandbox."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()  # the supervisor ends with its input, and everything inside with it
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            process.wait()
        process.stdout.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # the code may have left what cannot be removed

    def kill(self) -> None:
        """End it from another thread, while this one waits for an answer: that one is `lost`."""
        kill_with_children(self._process.pid)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None) -> None:
        self.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        data = memoryview((json.dumps(message) + "\n").encode())
        try:
            while data:
                data = data[os.write(self._process.stdin.fileno(), data) :]
        except BrokenPipeError:
            pass  # it has died; the answer that does not come says so

    def _receive(self, limit_s: float) -> dict[str, Any] | None:
        """Next answer; None if it does not come in time, or the supervisor has died."""
        assert self._process.stdout is not None
        fd, end = self._process.stdout.fileno(), time.monotonic() + limit_s
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while b"\n" not in self._received:
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                return None
            if not (more := os.read(fd, 1 << 16)):
                return None
            self._received += more
        line, self._received = self._received.split(b"\n", 1)
        return json.loads(line)


def reason_against(limits: Limits) -> str | None:
    """One line that says why this machine has no such sandbox, or None: runs a program in one."""
    try:
        with Sandbox(limits) as sandbox:
            outcome = sandbox.run("", {"kind": "stdin", "setup": "", "source": "print('works')"}, _START_S)
    except SandboxError as error:
        return str(error)
    if outcome != Outcome("exit 0", "works\n"):
        return f"the interpreter does not run in it ({outcome.status}); is {python()} readable for every user?"
    return None


def python() -> str:
    """Interpreter of the code: the one behind the virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _settings(limits: Limits, folder: str | None) -> dict[str, Any]:
    packages = _packages() if limits.packages else []
    home = WORK if folder is None else folder
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # the same score in every run
        "PYTHONDONTWRITEBYTECODE": "1",
        **({"PYTHONPATH": os.pathsep.join(packages)} if packages else {}),
        **dict.fromkeys(_ONE_THREAD, "1"),  # each thread of a pool costs address space
        **_library_path(),
    }
    return {
        "isolated": limits.isolated,
        "parent": os.getpid(),
        # -S: no site-packages, nor what their .pth files run.
        "command": [python(), "-s", "-S", "-P", "-X", "utf8", "-c", _RUNNER.read_text(encoding="utf-8")],
        "environment": environment,
        "shown": [python(), os.path.realpath(sys.base_prefix), os.path.realpath(sysconfig.get_path("stdlib")), *packages],
        "memory_bytes": limits.memory_mib << 20,
        "processes": limits.max_processes,
        "output_bytes": OUTPUT_BYTES,
        "folder": home,
    }


def _packages() -> Sequence[str]:
    return list(dict.fromkeys(os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")))


def _library_path() -> dict[str, str]:
    """The one variable of the rank's environment that a program gets, if its interpreter may not start without."""
    folder = sysconfig.get_config_var("LIBDIR") if sysconfig.get_config_var("Py_ENABLE_SHARED") else None
    return {"LD_LIBRARY_PATH": folder} if folder else {}
