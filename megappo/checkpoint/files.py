"""Files of a checkpoint: written while other threads hash them, and forced to the disk. A file's hash is the BLAKE3 of the
concatenated binary BLAKE3 digests of its chunks of 64 MiB (the last one shorter; an empty file has none), so that several threads
can hash one file, on writing and on reading. SHA-256 takes five times as long. Imports no torch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

CHUNK_BYTES = 64 << 20
_READ_BYTES = 1 << 20  # stays in a core's cache between the read and the hash


class FileEntry(NamedTuple):
    """Size in bytes and hash (hex) of one file."""

    bytes: int
    digest: str


def cores_of_rank() -> int:
    """Return this rank's number of cores: those the process may use, divided among the ranks of the node."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def hash_file(path: Path, threads: int) -> FileEntry:
    """Hash a file with `threads` threads. OSError if it is missing or not readable."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        starts = range(0, size, CHUNK_BYTES)
        if len(starts) <= 1 or threads == 1:
            digests = [_hash_range(file.fileno(), start) for start in starts]
        else:
            with ThreadPoolExecutor(min(threads, len(starts))) as pool:
                digests = list(pool.map(lambda start: _hash_range(file.fileno(), start), starts))
    return FileEntry(size, combine(digests))


def _hash_range(descriptor: int, start: int) -> bytes:
    digest, at, end, block = blake3(), start, start + CHUNK_BYTES, bytearray(_READ_BYTES)
    while at < end and (count := os.preadv(descriptor, [memoryview(block)[: end - at]], at)):
        digest.update(memoryview(block)[:count])
        at += count
    return digest.digest()


def hash_pieces(pieces: Iterable[memoryview]) -> bytes:
    """Return the digest of one chunk that lies in memory."""
    digest = blake3()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def combine(digests: Sequence[bytes]) -> str:
    """Return the hash (hex) of a file from the digests of its chunks, in order."""
    return blake3(b"".join(digests)).hexdigest()


def chunks(pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Cut consecutive pieces (of bytes) into lists of CHUNK_BYTES together; the last list holds the rest."""
    held, room = [], CHUNK_BYTES
    for piece in pieces:
        while len(piece):
            held.append(piece[:room])
            piece, room = piece[room:], room - len(held[-1])
            if room == 0:
                yield held
                held, room = [], CHUNK_BYTES
    if held:
        yield held


_VECTOR = 1024  # buffers that one writev takes, IOV_MAX on Linux


def write_file(path: Path, pieces: Iterable[memoryview], pool: ThreadPoolExecutor, threads: int) -> FileEntry:
    """Write consecutive `pieces` (memoryviews of bytes) to a new file, force it to the disk and return its fingerprint. pool,
    threads: hash what is written; at most threads + 1 chunks of 64 MiB wait for them, which bounds the memory of an iterator that
    makes copies. OSError if the disk is full or the file exists."""
    try:
        with path.open("xb", buffering=0) as file:
            digests = _write_and_hash(file.fileno(), pieces, pool, threads)
            os.fsync(file.fileno())
            return FileEntry(os.fstat(file.fileno()).st_size, combine(digests))
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


def sync_directory(path: Path) -> None:
    """Force the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
