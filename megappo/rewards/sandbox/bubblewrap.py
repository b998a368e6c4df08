"""Commands in bubblewrap (`bwrap`): new namespaces, a read-only root folder of the interpreter and the system's libraries.
No network, no home, no run directory, no /proc, no /sys, no device of a GPU. The working directory is new every time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

WORK = "/sandbox"  # working directory and HOME of the code; no interpreter lies below it, as may be of /tmp
PACKAGE = "bubblewrap is not installed (Debian and Ubuntu: apt-get install bubblewrap)"
INSIDE = 1000  # user and group of the code as it sees them
_NOBODY = 65534  # as the machine sees them, if root runs this
_WORK_BYTES = 16 << 20
_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class SandboxError(RuntimeError):
    """A sandbox could not be made, or no program be started in it: a fault of the machine, not of the code."""


def python() -> str:
    """Interpreter of the code: the one behind the virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def bwrap() -> str | None:
    """Path of bubblewrap; None if it is not installed."""
    return shutil.which("bwrap")


def isolated(command: list[str], packages: Sequence[str], info: int) -> tuple[list[str], tuple[int, ...]]:
    """Wrap a command: (the command in bubblewrap, files that it needs open).
    packages: folders that it may read. info: file to which bubblewrap writes the number of the first process."""
    program = bwrap()
    assert program is not None, "a sandbox has it"
    options = [program, "--die-with-parent", "--as-pid-1", "--new-session", "--info-fd", str(info), "--hostname", "sandbox"]
    options += ["--cap-drop", "ALL", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    users: tuple[int, ...] = ()
    if is_root_with_nobody():
        # Root prepares the folders, whose parents nobody may enter; processes of root have no limit, so the runner
        # becomes nobody. Its first process stays root: bubblewrap, when it dies, may not end a process of another user.
        users = (_user_namespace(),)
        options += ["--userns", str(users[0]), "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-user", "--disable-userns", "--uid", str(INSIDE), "--gid", str(INSIDE)]
    shown = [python(), os.path.realpath(sys.base_prefix), os.path.realpath(sysconfig.get_path("stdlib")), *packages]
    paths = [path for path in [*_SYSTEM, *shown] if os.path.exists(path)]
    parents = {str(parent) for path in [*paths, *_DEVICES] for parent in Path(path).parents}
    for folder in sorted(parents - {"/", *paths}):  # bubblewrap would make them for its own user
        if not any(folder.startswith(f"{path}/") for path in paths):
            options += ["--perms", "0755", "--dir", folder]
    for path in sorted(set(paths)):
        options += ["--ro-bind", path, path]
    for device in _DEVICES:
        options += ["--dev-bind", device, device]
    options += ["--perms", "1777", "--size", str(_WORK_BYTES), "--tmpfs", WORK, "--remount-ro", "/", "--chdir", WORK]
    return [*options, "--", *command], users


@lru_cache
def is_root_with_nobody() -> bool:
    """True if this is root and the user nobody exists."""
    # In a namespace of one user nobody does not exist, and root is an ordinary user.
    found = 0
    for name in ("uid_map", "gid_map"):
        ranges = [tuple(map(int, line.split())) for line in Path("/proc/self", name).read_text(encoding="ascii").splitlines()]
        found += any(first <= _NOBODY < first + count for first, _, count in ranges)  # first inside, first outside, number
    return os.geteuid() == 0 and found == 2


@lru_cache
def _user_namespace() -> int:
    """Make a user namespace of root and nobody, in which no other can be made; returns its file. Raises SandboxError."""
    # Bubblewrap itself maps one user only.
    close = 'sh -c "echo 0 >/proc/sys/user/max_user_namespaces"'  # by a shell that is started as root of the namespace
    script = f"echo; read go; {close} 2>/dev/null; echo; read end"
    helper = subprocess.Popen(
        ["unshare", "--user", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert helper.stdin is not None and helper.stdout is not None
    with helper:
        if not helper.stdout.readline():
            raise SandboxError(helper.communicate()[1].decode().strip() or "no user namespace can be made")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{helper.pid}", name).write_text(f"0 0 1\n{INSIDE} {_NOBODY} 1\n", encoding="ascii")
        helper.stdin.write(b"go\n")
        helper.stdin.flush()
        helper.stdout.readline()
        return os.open(f"/proc/{helper.pid}/ns/user", os.O_RDONLY)
