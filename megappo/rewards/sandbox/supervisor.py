"""Process that runs model-written code for a rank, one test at a time, and reports how each ended. Standard library only.

`box.py` starts it with a clean environment. Its input is a line of JSON with the settings, then one line per test; it answers each
with one line. Isolated, it is two processes: one that waits outside, and the first process of new namespaces, whose end
is the end of every process inside. It never reads what the code printed: the rank compares.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import resource
import select
import signal
import sys
import time
from typing import Any, NamedTuple

from megappo.rewards.sandbox import kernel
from megappo.rewards.sandbox.root_folder import WORK, enter_root_folder, renew_work_folder

_NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
)
_INSIDE = 1000  # user and group of the code, as it sees them
_NOBODY = 65534  # as the machine sees them, if root runs this
TASK_FD, REPORT_FD = 3, 4
_HIGH = 100  # files that the code must not get are moved up to here
_OPEN_FILES = 64
_THREADS_OF_OTHERS = 32  # that may start meanwhile: without a namespace, the limit counts all processes of the user


class Settings(NamedTuple):
    """One line of JSON. shown: paths beside the system's that the code may read. folder: working directory if not isolated."""

    isolated: bool
    parent: int
    command: list[str]
    environment: dict[str, str]
    shown: list[str]
    memory_bytes: int
    processes: int
    output_bytes: int
    folder: str


def main() -> None:
    """Read the settings, make the sandbox, answer `{"ready": true}` or `{"error": text}`, then serve tests until the input ends."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_DFL)  # blocked since the start; the first process of a namespace gets what has a handler
    os.umask(0o022)  # a run's folders may be private, but the code has to find its interpreter
    settings = Settings(**json.loads(sys.stdin.buffer.readline()))
    kernel.kill_with_parent()
    if os.getppid() != settings.parent:  # it ended before the call
        os._exit(1)
    try:
        if settings.isolated:
            _enter_namespaces()
            enter_root_folder(settings.shown)
            kernel.name_host("sandbox")
        else:
            kernel.adopt_orphans()
        kernel.hide_memory()
    except OSError as error:
        _answer({"error": f"{error.filename}: {error.strerror}"})
        os._exit(0)
    _answer({"ready": True})
    _serve(settings)


def _enter_namespaces() -> None:
    """Return in the first process of new namespaces; the process that calls waits for its end and ends too."""
    uid, gid, root = os.geteuid(), os.getegid(), _is_root_with_nobody()
    outside = os.getpid()
    go, done = os.pipe(), os.pipe()
    mapper = os.fork()
    if mapper == 0:  # stays outside: only there may the users of the namespace be named
        os.close(go[1])
        try:
            if os.read(go[0], 1):
                _write_maps(outside, uid, gid, root)
        except OSError as error:
            os.write(done[1], str(error).encode())
        finally:
            os._exit(0)
    os.close(done[1])
    try:
        kernel.unshare(_NAMESPACES)
        os.write(go[1], b"1")
        failure = os.read(done[0], 4096).decode()
    finally:
        os.close(go[1])
        os.waitpid(mapper, 0)
    for fd in (go[0], done[0]):
        os.close(fd)
    if failure:
        raise OSError(errno.EPERM, failure, "users of the namespace")
    if root:
        os.setgroups([])
    kernel.kill_with_parent()  # new credentials have cleared it
    inner = os.fork()
    if inner:
        for fd in (0, 1):
            os.close(fd)
        os.waitpid(inner, 0)  # returns when every process of the namespace is gone
        os._exit(0)
    kernel.kill_with_parent()


def _is_root_with_nobody() -> bool:
    """True if this is root, and the user nobody exists: in a namespace of one user it does not, and root is an ordinary user."""
    found = 0
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}", encoding="utf-8") as file:
            ranges = [tuple(map(int, line.split())) for line in file]  # first inside, first outside, number
        found += any(first <= _NOBODY < first + count for first, _, count in ranges)
    return os.geteuid() == 0 and found == 2


def _write_maps(pid: int, uid: int, gid: int, root: bool) -> None:
    """Map the user inside to this one, or to nobody; root also to itself: it prepares the folders, and is never the code's."""
    if root:
        maps = {"gid_map": f"0 0 1\n{_INSIDE} {_NOBODY} 1\n", "uid_map": f"0 0 1\n{_INSIDE} {_NOBODY} 1\n"}
    else:
        maps = {"setgroups": "deny", "gid_map": f"{_INSIDE} {gid} 1\n", "uid_map": f"{_INSIDE} {uid} 1\n"}
    for name, text in maps.items():
        with open(f"/proc/{pid}/{name}", "w", encoding="utf-8") as file:
            file.write(text)


def _serve(settings: Settings) -> None:
    first = True
    while line := sys.stdin.buffer.readline():
        if settings.isolated:
            renew_work_folder(first)
        first = False
        _answer(_run(json.loads(line), settings))


def _run(test: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Run one test. test: limit_s, stdin (text), task (text that the runner reads). Answer: status, stdout, report."""
    files = {0: _file(test["stdin"]), 1: _file(), TASK_FD: _file(test["task"]), REPORT_FD: _file()}
    errors = fcntl.fcntl(_file(), fcntl.F_DUPFD_CLOEXEC, _HIGH)
    child = os.fork()
    if child == 0:
        try:
            _become(files, settings, test["limit_s"])
        except BaseException as error:  # whatever it is, this process must not serve tests
            os.write(errors, repr(error).encode())
        finally:
            os._exit(127)
    try:
        status = _wait(child, test["limit_s"])
        _end_all(child, settings)
        if status == "abandoned":  # by the rank, which has ended or wants no answer any more
            os._exit(0)
        if failure := _text(errors):
            return {"error": f"the code could not be started: {failure}"}
        stdout = _text(files[1])
        if len(stdout.encode()) >= settings.output_bytes:
            status = "output"
        return {"status": status, "stdout": stdout, "report": _text(files[REPORT_FD])}
    finally:
        for fd in (*files.values(), errors):
            os.close(fd)


def _become(files: dict[int, int], settings: Settings, limit_s: float) -> None:
    """Give up everything and become the runner."""
    high = {target: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH) for target, fd in files.items()}
    for target, fd in high.items():
        os.dup2(fd, target)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    os.setsid()
    os.chdir(WORK if settings.isolated else settings.folder)
    _limit(settings, limit_s)
    if settings.isolated:
        kernel.forgo_privileges()
        if os.getuid() == 0:
            os.setresgid(_INSIDE, _INSIDE, _INSIDE)
            os.setresuid(_INSIDE, _INSIDE, _INSIDE)
    kernel.no_new_privileges()
    kernel.deny_calls()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.closerange(REPORT_FD + 1, _HIGH)  # those above are closed on exec
    _set(resource.RLIMIT_AS, settings.memory_bytes)
    os.execve(settings.command[0], settings.command, settings.environment)


def _limit(settings: Settings, limit_s: float) -> None:
    _set(resource.RLIMIT_CPU, math.ceil(limit_s) + 1)  # for what a stopped supervisor could not end
    _set(resource.RLIMIT_NPROC, settings.processes + _processes_of_others(settings))
    _set(resource.RLIMIT_FSIZE, settings.output_bytes)
    _set(resource.RLIMIT_NOFILE, _OPEN_FILES)
    for none in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, 12):  # 12: RLIMIT_MSGQUEUE
        _set(none, 0)


def _processes_of_others(settings: Settings) -> int:
    if settings.isolated:
        return 0 if os.getuid() == 0 else 2  # the two of this program have the user of the code
    count = _THREADS_OF_OTHERS
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass  # it has ended
    return count


def _set(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def _wait(child: int, limit_s: float) -> str:
    """`exit N`, `signal N` or `timeout`. The end of the rank, seen as the end of the input, ends this process and the namespace."""
    end = time.monotonic() + limit_s
    pidfd = os.pidfd_open(child)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(0, 0)  # reports nothing but the end
    try:
        while (left := end - time.monotonic()) > 0:
            ready = [fd for fd, _ in poll.poll(math.ceil(left * 1000))]
            if 0 in ready:
                return "abandoned"
            if pidfd in ready:
                result = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # reaped with the others
                assert result is not None
                return f"{'exit' if result.si_code == os.CLD_EXITED else 'signal'} {result.si_status}"
        return "timeout"
    finally:
        os.close(pidfd)


def _end_all(child: int, settings: Settings) -> None:
    """Kill and reap everything that the test has started, daemons too."""
    if settings.isolated:
        assert os.getpid() == 1, "-1 would be every process of the user"
        _kill(-1)
        _reap(0)
        return
    try:
        os.killpg(child, signal.SIGKILL)  # no wait has freed its number yet
    except (ProcessLookupError, PermissionError):
        pass  # only the dead child is left
    while orphans := _children():  # they have come to this process; each of theirs comes when it dies
        for pid in orphans:
            _kill(pid)
        _reap(os.WNOHANG)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="utf-8") as file:
        return [int(pid) for pid in file.read().split()]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _reap(options: int) -> None:
    try:
        while os.waitpid(-1, options)[0]:
            pass
    except ChildProcessError:
        pass


def _file(text: str = "") -> int:
    """File in memory, closed on exec: nobody has to pump it, and RLIMIT_FSIZE bounds what is written."""
    fd = os.memfd_create("test")
    os.write(fd, text.encode("utf-8", "surrogatepass"))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _text(fd: int) -> str:
    return os.pread(fd, os.fstat(fd).st_size, 0).decode("utf-8", "replace")


def _answer(answer: dict[str, Any]) -> None:
    data = (json.dumps(answer) + "\n").encode()
    while data:
        data = data[os.write(1, data) :]
