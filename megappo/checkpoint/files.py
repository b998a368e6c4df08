"""Writes a checkpoint's files: other threads hash them meanwhile, and they are forced to the disk. Imports no torch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from megappo.checkpoint.hashing import Fingerprint, chunks, combine, hash_pieces
from megappo.checkpoint.manifest import sync_directory

_VECTOR = 1024  # buffers that one writev takes, IOV_MAX on Linux


def write_file(path: Path, pieces: Iterable[memoryview], pool: ThreadPoolExecutor, threads: int) -> Fingerprint:
    """Write consecutive `pieces` (memoryviews of bytes) to a new file, force it to the disk and return its fingerprint. pool,
    threads: hash what is written; at most threads + 1 chunks of 64 MiB wait for them, which bounds the memory of an iterator that
    makes copies. OSError if the disk is full or the file exists."""
    try:
        with path.open("xb", buffering=0) as file:
            digests = _write_and_hash(file.fileno(), pieces, pool, threads)
            os.fsync(file.fileno())
            return Fingerprint(os.fstat(file.fileno()).st_size, combine(digests))
    except OSError as error:
        error.filename = error.filename or str(path)  # writes and fsync do not name it
        raise


def _write_and_hash(descriptor: int, pieces: Iterable[memoryview], pool: ThreadPoolExecutor, threads: int) -> list[bytes]:
    digests: list[bytes] = []
    waiting: deque[Future[bytes]] = deque()
    try:
        for chunk in chunks(pieces):
            if len(waiting) > threads:
                digests.append(waiting.popleft().result())
            # The hash is of the memory, not of what the disk returns, so a load compares with what was meant.
            waiting.append(pool.submit(hash_pieces, chunk))
            _write_all(descriptor, chunk)
    finally:
        wait(waiting)  # also after an error: the caller may free the memory then
    return digests + [future.result() for future in waiting]


def _write_all(descriptor: int, pieces: list[memoryview]) -> None:
    for first in range(0, len(pieces), _VECTOR):
        group = pieces[first : first + _VECTOR]
        while group:
            count = os.writev(descriptor, group)
            # A full disk gives a short count first and an error at the next call.
            while group and count >= len(group[0]):
                count -= len(group.pop(0))
            if group:
                group[0] = group[0][count:]


def sync_parents(place: Path, names: Iterable[str]) -> None:
    """Force the directories of these files, relative to `place`, to the disk."""
    for parent in {parent for name in names for parent in Path(name).parents}:
        sync_directory(place / parent)
