"""Sandbox of a rank: runs one test after the other, each in processes of its own. Each thread may hold one.
Bubblewrap (`bwrap`) makes the namespaces and the root folder; `runner.py` limits itself before it runs the code. When the first
process of the namespaces ends, which the runner leaves behind, every process inside ends."""

from __future__ import annotations

import json
import math
import os
import resource
import secrets
import select
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from megappo.rewards.sandbox import bubblewrap
from megappo.rewards.sandbox.bubblewrap import INSIDE, PACKAGE, WORK, SandboxError, is_root_with_nobody, isolated, python
from megappo.runtime.helper_process import deaf_to_stop

OUTPUT_BYTES = 1 << 20  # of stdout, and of any file that the code writes
_START_S = 60.0  # an idle machine takes 0.03 s
_OPEN_FILES = 64
_THREADS_OF_OTHERS = 32  # that may start meanwhile: without a namespace, the limit counts all processes of the user
_RLIMIT_MSGQUEUE = 12  # Python has no name for it
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_MARK = "MEGAPPO_SANDBOX"


@dataclass(frozen=True)
class Limits:
    """Limits of a sandbox."""

    memory_mib: int = 512
    """Address space of each process."""
    max_processes: int = 8
    packages: bool = False
    """The code may import this run's packages."""
    isolated: bool = True
    """No network, no files but the interpreter's, no processes but its own; needs bubblewrap. Otherwise the code has the rights
    of the rank's user, less its environment."""


@dataclass(frozen=True)
class Outcome:
    """End of one test."""

    status: str
    """`exit CODE`, `signal NUMBER`, `timeout`, `output` (too much) or `lost` (killed from outside)."""
    stdout: str = ""
    """At most `OUTPUT_BYTES`."""
    report: str = ""
    """Text that the runner wrote, or the code in its place."""


class Sandbox:
    """Place to run the code of one response; a context manager, whose end leaves no process behind."""

    def __init__(self, limits: Limits) -> None:
        """Raises SandboxError, one line, if bubblewrap is not installed."""
        self._limits = limits
        self._folder = None if limits.isolated else tempfile.mkdtemp(prefix="megappo-code-")
        self._first: int | None = None  # process whose end is the end of the test
        self._killed = False
        if limits.isolated and bubblewrap.bwrap() is None:
            raise SandboxError(PACKAGE)

    def run(self, stdin: str, task: Mapping[str, Any], limit_s: float) -> Outcome:
        """Run one test. task: as `runner.py` reads it. Raises SandboxError if nothing could be started."""
        end = time.monotonic() + limit_s
        user = INSIDE if self._limits.isolated and is_root_with_nobody() else None
        text = json.dumps({**task, "user": user, "limits": self._resources(limit_s)})
        with ExitStack() as stack:
            given, stdout, errors, asked, report = (stack.enter_context(_file(t)) for t in (stdin, "", "", text, ""))
            mark = secrets.token_hex(16)
            read, written = os.pipe()
            stack.callback(os.close, read)
            fds = (asked.fileno(), report.fileno())
            command = [python(), "-s", "-S", "-P", "-X", "utf8", "-c", _runner(), *map(str, fds)]
            try:
                process = self._start(command, {_MARK: mark}, (given, stdout, errors), (*fds, written))
            except OSError as error:  # no user namespace, or no memory for another process
                raise SandboxError(f"{error.filename or 'the sandbox'}: {error.strerror}") from error
            finally:
                os.close(written)
            status = self._wait(process, read, end)
            self._end(process, mark)
            if os.lseek(asked.fileno(), 0, os.SEEK_CUR) == 0 and status not in ("timeout", "lost"):
                said = _text(errors).strip().splitlines()  # the runner has read nothing: this is bubblewrap's
                raise SandboxError(said[0] if said else f"the code could not be started: {status}")
            output = _text(stdout)
            if len(output.encode()) >= OUTPUT_BYTES:
                status = "output"
            return Outcome(status, output, _text(report))

    def _start(
        self, command: list[str], mark: Mapping[str, str], streams: Sequence[IO[bytes]], passed: tuple[int, ...]
    ) -> subprocess.Popen[bytes]:
        if self._folder is None:
            # Bubblewrap writes to the last of `passed` which process is the first.
            command, more = isolated(command, _packages() if self._limits.packages else (), passed[-1])
            passed = (*passed, *more)
        given, stdout, errors = streams
        with deaf_to_stop():  # a request to stop is the rank's business: its step still needs this score
            return subprocess.Popen(
                command,
                stdin=given,
                stdout=stdout,
                stderr=errors,
                cwd=self._folder or "/",
                env={**_environment(self._limits, self._folder or WORK), **mark},
                pass_fds=passed,
                start_new_session=self._folder is not None,
            )

    def _resources(self, limit_s: float) -> list[tuple[int, int]]:
        """Pairs (limit of `resource`, value) that the runner sets for itself and the code."""
        limits = self._limits
        first = 0 if is_root_with_nobody() else 1  # process of the namespaces
        beside = first if limits.isolated else _processes_of_user()
        values = {
            resource.RLIMIT_AS: limits.memory_mib << 20,
            resource.RLIMIT_CPU: math.ceil(limit_s) + 1,  # for what a stopped rank could not end
            resource.RLIMIT_NPROC: limits.max_processes + beside,
            resource.RLIMIT_FSIZE: OUTPUT_BYTES,
            resource.RLIMIT_NOFILE: _OPEN_FILES,
            **dict.fromkeys((resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, _RLIMIT_MSGQUEUE), 0),
        }
        return list(values.items())

    def _wait(self, process: subprocess.Popen[bytes], said: int, end: float) -> str:
        """Wait until nothing runs in the namespaces: `exit N`, `signal N`, `timeout` or `lost`."""
        self._first = process.pid if self._folder is not None else _first_process(said)
        try:
            if self._first is None:  # bubblewrap could make no namespace
                return f"exit {process.wait()}"
            if self._killed:
                self.kill()
            in_time = _has_ended(self._first, end)
            if not in_time:
                _kill(self._first)
                _has_ended(self._first, math.inf)
        finally:
            self._first = None
        code = process.wait()
        if self._killed:
            return "lost"
        code = code if code <= 128 else 128 - code  # bubblewrap's 128 + signal
        return "timeout" if not in_time else f"exit {code}" if code >= 0 else f"signal {-code}"

    def _end(self, process: subprocess.Popen[bytes], mark: str) -> None:
        if self._folder is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        # Without namespaces daemons outlive their group: all that has the environment of the test is killed.
        while left := list(_marked(f"{_MARK}={mark}".encode())):
            for pid in left:
                _kill(pid)
            time.sleep(0.001)

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # the code may have left what cannot be removed

    def kill(self) -> None:
        """End the test from another thread than the one that runs it; its outcome is `lost`."""
        self._killed = True
        if (first := self._first) is not None:
            _kill(first)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None) -> None:
        self.close()


def reason_against(limits: Limits) -> str | None:
    """Try a program in such a sandbox. Returns the reason, in one line, why this machine has none; None if it has."""
    try:
        with Sandbox(limits) as sandbox:
            outcome = sandbox.run("", {"kind": "stdin", "setup": "", "source": "print('works')"}, _START_S)
    except SandboxError as error:
        return str(error)
    if outcome != Outcome("exit 0", "works\n"):
        return f"the interpreter does not run in it ({outcome.status}); is {python()} readable for every user?"
    return None


@lru_cache
def _runner() -> str:
    # Read once, not for each test: the program is handed over as text, as the sandbox may not see this file.
    return Path(__file__).with_name("runner.py").read_text(encoding="utf-8")


def _environment(limits: Limits, home: str) -> dict[str, str]:
    packages = _packages() if limits.packages else []
    library = sysconfig.get_config_var("LIBDIR") if sysconfig.get_config_var("Py_ENABLE_SHARED") else None
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # the same score in every run
        "PYTHONDONTWRITEBYTECODE": "1",
        **({"PYTHONPATH": os.pathsep.join(packages)} if packages else {}),
        **dict.fromkeys(_ONE_THREAD, "1"),  # each thread of a pool costs address space
        **({"LD_LIBRARY_PATH": library} if library else {}),  # without it the interpreter may not start
    }


def _packages() -> Sequence[str]:
    return list(dict.fromkeys(os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")))


def _first_process(said: int) -> int | None:
    """Number of the first process of the namespaces, as reported by bubblewrap; None if it made none."""
    text = b""
    while not text.rstrip().endswith(b"}"):
        if not (more := os.read(said, 4096)):
            return None
        text += more
    return json.loads(text)["child-pid"]


def _has_ended(pid: int, end: float) -> bool:
    """Wait until this time for a process, which its parent has yet to reap, to end; true if it did."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        left = end - time.monotonic()
        return bool(poll.poll(None if left == math.inf else max(0, math.ceil(left * 1000))))
    finally:
        os.close(pidfd)


def _processes_of_user() -> int:
    count = _THREADS_OF_OTHERS
    for folder in _processes():
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                count += len(os.listdir(folder / "task"))
    return count


def _marked(mark: bytes) -> Iterator[int]:
    for folder in _processes():
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def _processes() -> list[Path]:
    return [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _file(text: str) -> IO[bytes]:
    # In memory: nothing has to be pumped, and RLIMIT_FSIZE bounds what is written.
    file = os.fdopen(os.memfd_create("test"), "r+b", buffering=0)
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)
    return file


def _text(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode("utf-8", "replace")
