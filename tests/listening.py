"""Sockets on which the processes below this one accept connections, read from /proc while a test's ranks run."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import NamedTuple

import psutil

LISTEN = "0A"  # state of a socket in /proc/net/tcp
WILDCARDS = {"0.0.0.0", "::"}


class Listener(NamedTuple):
    """address: of the interface. command: the process's command line."""

    address: str
    port: int
    command: str


def listeners() -> set[Listener]:
    """Listening TCP sockets of this process and of all below it."""
    by_inode = {inode: (address, port) for table in ("tcp", "tcp6") for inode, address, port in _sockets(Path("/proc/net", table))}
    found = set()
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        try:
            inodes = {int(target[8:-1]) for target in _descriptors(process.pid) if target.startswith("socket:[")}
            command = " ".join(process.cmdline())
        except (OSError, psutil.Error):  # it has just ended
            continue
        found |= {Listener(*by_inode[inode], command) for inode in inodes & by_inode.keys()}
    return found


def _sockets(table: Path) -> list[tuple[int, str, int]]:
    """(inode, address, port) of every listening socket of a table of the kernel."""
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    return [(int(row[9]), *_place(row[1])) for row in rows if row[3] == LISTEN]


def _place(text: str) -> tuple[str, int]:
    """0100007F:1F90 -> 127.0.0.1, 8080: words of 4 bytes in the order of the host, little-endian."""
    address, port = text.split(":")
    packed = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed), int(port, 16)


def _descriptors(pid: int) -> list[str]:
    targets = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            targets.append(os.readlink(entry))
        except FileNotFoundError:  # closed meanwhile
            continue
    return targets


class Watch:
    """All listeners seen in the block, looked for every `interval_s` seconds by a thread."""

    def __init__(self, interval_s: float = 0.5) -> None:
        self.seen: set[Listener] = set()
        self._interval_s, self._over = interval_s, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.is_set():
            self.seen |= listeners()
            self._over.wait(self._interval_s)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
