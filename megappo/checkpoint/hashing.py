"""SHA-256 of files in chunks, so that several threads hash one file, on writing and on reading. Imports no torch.

A checkpoint of format 2 records of every file the SHA-256 of the concatenated binary SHA-256 digests of its chunks of 64 MiB; the
last chunk is what is left, and an empty file has no chunk. Format 1 recorded the plain SHA-256 of the content.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

CHUNK_BYTES = 64 << 20
_READ_BYTES = 1 << 20  # stays in a core's cache between the read and the hash


class Fingerprint(NamedTuple):
    """Size in bytes and SHA-256 (hex) of one file."""

    bytes: int
    sha256: str


def cores_of_rank() -> int:
    """Processor cores for one rank: those that this process may use, divided among the ranks of the node."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def hash_in_chunks(path: Path, threads: int) -> Fingerprint:
    """Hash a file with `threads` threads, the way of format 2. OSError if it is missing or not readable."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        starts = range(0, size, CHUNK_BYTES)
        if len(starts) <= 1 or threads == 1:
            digests = [_hash_range(file.fileno(), start) for start in starts]
        else:
            with ThreadPoolExecutor(min(threads, len(starts))) as pool:
                digests = list(pool.map(lambda start: _hash_range(file.fileno(), start), starts))
    return Fingerprint(size, combine(digests))


def hash_plain(path: Path, threads: int) -> Fingerprint:
    """Hash a file as format 1 did: one plain SHA-256, which only one thread can compute."""
    with path.open("rb") as file:
        return Fingerprint(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


HASHES: dict[int, Callable[[Path, int], Fingerprint]] = {1: hash_plain, 2: hash_in_chunks}
"""Format of a manifest -> the hash of its files."""


def _hash_range(descriptor: int, start: int) -> bytes:
    """Digest of the chunk that begins at `start`."""
    digest, at, end, block = hashlib.sha256(), start, start + CHUNK_BYTES, bytearray(_READ_BYTES)
    while at < end and (count := os.preadv(descriptor, [memoryview(block)[: end - at]], at)):
        digest.update(memoryview(block)[:count])
        at += count
    return digest.digest()


def hash_pieces(pieces: Iterable[memoryview]) -> bytes:
    """Digest of one chunk that lies in memory."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def combine(digests: Sequence[bytes]) -> str:
    """SHA-256 (hex) of a file from the digests of its chunks, in order."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def chunks(pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Cut consecutive pieces (of bytes) into lists of CHUNK_BYTES together, the last one of the rest."""
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
