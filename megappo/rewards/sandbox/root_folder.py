"""Root folder of a sandbox: the interpreter and the system's libraries, read-only, and nothing else of the machine.

No home, no run directory, no /proc, no /sys, no device of a GPU. /sandbox is made anew for every test. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from megappo.rewards.sandbox import kernel

SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
WORK = "/sandbox"  # working directory and HOME of the code; no interpreter lies below it, as may be of /tmp
WORK_MIB = 16
_OLD, _NEW = "/old", "/new"


def enter_root_folder(shown: Sequence[str]) -> None:
    """Leave the machine's files for a folder of `shown` (and what the system needs), read-only. In a mount namespace of its own."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)  # or the machine would see these mounts
    # Two steps, so that a path below /tmp can be shown although the new root folder is put there.
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    os.mkdir(f"/tmp{_OLD}")
    os.mkdir(f"/tmp{_NEW}")
    kernel.mount(f"/tmp{_NEW}", f"/tmp{_NEW}", None, kernel.MS_BIND)  # a root folder has to be a mount
    kernel.pivot_root("/tmp", f"/tmp{_OLD}")
    os.chdir("/")
    os.mkdir(f"{_NEW}{WORK}")
    mounts = [path for path in sorted({*SYSTEM, *shown}) if os.path.lexists(_OLD + path) and _show(path)]
    for path in _DEVICES:
        _show(path)
    os.chdir(_NEW)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")  # the old one, which lies on top of the new
    os.chdir("/")
    for path in mounts:
        kernel.make_read_only(path)
    kernel.mount("none", "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)


def renew_work_folder(first: bool) -> None:
    """Mount an empty working directory in place of the one of the test before."""
    if not first:
        os.chdir("/")
        kernel.unmount(WORK)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("tmpfs", WORK, "tmpfs", flags, f"size={WORK_MIB}m,nr_inodes=4096,mode=1777")


def _show(path: str) -> bool:
    """Put a file, a folder or a link of the old root folder at its place in the new one. False if that took no mount."""
    source, target = _OLD + path, _NEW + path
    if os.path.lexists(target):  # part of a folder that is shown already
        return False
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)  # /bin -> usr/bin
        return False
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    return True
