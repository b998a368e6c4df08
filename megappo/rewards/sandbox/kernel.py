"""System calls of the sandbox that Python 3.11 has no function for. Standard library only: its process has no site-packages."""

from __future__ import annotations

import ctypes
import errno
import os
import signal

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_SYS_MOUNT_SETATTR = 442  # of every architecture: it came after their tables were joined
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SECCOMP_MODE_FILTER = 2

# System calls that no solution of a programming task needs: numbers of x86_64 and of the table that newer architectures share.
# They open more of the kernel to hostile code (namespaces, bpf, io_uring), look into other processes, or take memory
# that no limit of a process counts (System V, keys).
_DENIED = {
    "x86_64": (29, 64, 68, 101, 155, 165, 166, 175, 246, 248, 249, 250, 272, 298, 304, 308, 310, 311, 313, 320, 321, 323, 425),
    "aarch64": (194, 190, 186, 117, 41, 40, 39, 105, 104, 217, 218, 219, 97, 241, 265, 268, 270, 271, 273, 294, 280, 282, 425),
}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000  # bit of a second numbering of x86_64's calls, which would pass the list
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF: ld abs word; jeq, jge, jset by a constant; ret
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    _check(_libc.mount(*encoded, ctypes.c_ulong(flags), None if data is None else data.encode()), f"mount {target}")


def unmount(target: str) -> None:
    """Take a mount out of sight; it ends with its last user."""
    _check(_libc.umount2(target.encode(), _MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    _check(_libc.pivot_root(new.encode(), old.encode()), "pivot_root")


def name_host(name: str) -> None:
    _check(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name))), "sethostname")


def make_read_only(target: str) -> None:
    """Make a mount and those below it read-only, without set-uid programs and devices. OSError before Linux 5.12."""
    wanted = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, 0, 0)  # struct mount_attr
    arguments = (_AT_FDCWD, target.encode(), _AT_RECURSIVE, ctypes.byref(wanted), ctypes.c_size_t(ctypes.sizeof(wanted)))
    _check(_libc.syscall(ctypes.c_long(_SYS_MOUNT_SETATTR), *arguments), f"mount_setattr {target}")


def kill_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def hide_memory() -> None:
    """Let no process of the same user read or trace this one."""
    _prctl(_PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forgo_privileges() -> None:
    """Give up every capability for good: set-uid programs give none back."""
    capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) == 0:
        capability += 1
    if ctypes.get_errno() != errno.EINVAL:  # EINVAL: one more than the kernel has
        raise OSError(ctypes.get_errno(), "prctl(PR_CAPBSET_DROP)")


def no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def deny_calls() -> None:
    """Let the listed system calls fail with EPERM for this process and its descendants. Needs `no_new_privileges`.

    Machines of an architecture without a list keep all their calls: the namespaces hold without it.
    """
    machine = os.uname().machine
    if machine not in _DENIED:
        return
    program = _filter(machine)
    code = b"".join(
        instruction.to_bytes(2, "little") + bytes((then, other)) + constant.to_bytes(4, "little")
        for instruction, then, other, constant in program
    )
    buffer = ctypes.create_string_buffer(code, len(code))

    class _Program(ctypes.Structure):  # struct sock_fprog
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    program_of = _Program(len(program), ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program_of), 0, 0), "prctl(PR_SET_SECCOMP)")


def _filter(machine: str) -> list[tuple[int, int, int, int]]:
    """Instructions: code, jump if true, jump if false, constant. seccomp's data: call at 0, architecture at 4, arguments at 16."""
    namespaces = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
    program = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        # The C library falls back to clone, whose flags a filter can read.
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    ]
    for number in _DENIED[machine]:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    return [
        *program,
        (_EQUAL, 0, 3, _CLONE[machine]),
        (_LOAD, 0, 0, 16),
        (_ANY_BIT, 0, 1, namespaces),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl({option})")


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
