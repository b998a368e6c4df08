"""Hashes of files in chunks, so that several threads hash one file, on writing and on reading. Imports no torch.

A checkpoint of format 3 records of every file the BLAKE3 hash of the concatenated binary BLAKE3 hashes of its chunks of 64 MiB; the
last chunk is what is left, and an empty file has no chunk. Format 2 recorded SHA-256 in BLAKE3's place, which takes five times as
long, and format 1 the plain SHA-256 of the content.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from blake3 import blake3

CHUNK_BYTES = 64 << 20
_READ_BYTES = 1 << 20  # stays in a core's cache between the read and the hash


class Digest(Protocol):
    """A hash in the making, of hashlib or blake3. Both release the interpreter's lock while they hash."""

    def update(self, data: memoryview, /) -> object: ...

    def digest(self) -> bytes: ...

    def hexdigest(self) -> str: ...


class Fingerprint(NamedTuple):
    """Size in bytes and hash (hex) of one file."""

    bytes: int
    digest: str


class Scheme(NamedTuple):
    """Hashes of one format. name: for people. key: of a hash in the manifest. hash: of a file, with a number of threads."""

    name: str
    key: str
    hash: Callable[[Path, int], Fingerprint]


def cores_of_rank() -> int:
    """Processor cores for one rank: those that this process may use, divided among the ranks of the node."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def hash_in_chunks(path: Path, threads: int, new: Callable[[], Digest] = blake3) -> Fingerprint:
    """Hash a file with `threads` threads, as the newest format does. OSError if it is missing or not readable."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        starts = range(0, size, CHUNK_BYTES)
        if len(starts) <= 1 or threads == 1:
            digests = [_hash_range(file.fileno(), start, new) for start in starts]
        else:
            with ThreadPoolExecutor(min(threads, len(starts))) as pool:
                digests = list(pool.map(lambda start: _hash_range(file.fileno(), start, new), starts))
    return Fingerprint(size, combine(digests, new))


def hash_plain(path: Path, threads: int) -> Fingerprint:
    """Hash a file as format 1 did: one plain SHA-256, which only one thread can compute."""
    with path.open("rb") as file:
        return Fingerprint(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


SCHEMES = {
    1: Scheme("SHA-256", "sha256", hash_plain),
    2: Scheme("SHA-256", "sha256", partial(hash_in_chunks, new=hashlib.sha256)),
    3: Scheme("BLAKE3", "blake3", hash_in_chunks),
}
"""By the format of a manifest."""


def _hash_range(descriptor: int, start: int, new: Callable[[], Digest]) -> bytes:
    """Digest of the chunk that begins at `start`."""
    digest, at, end, block = new(), start, start + CHUNK_BYTES, bytearray(_READ_BYTES)
    while at < end and (count := os.preadv(descriptor, [memoryview(block)[: end - at]], at)):
        digest.update(memoryview(block)[:count])
        at += count
    return digest.digest()


def hash_pieces(pieces: Iterable[memoryview]) -> bytes:
    """Digest of one chunk that lies in memory."""
    digest = blake3()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def combine(digests: Sequence[bytes], new: Callable[[], Digest] = blake3) -> str:
    """Hash (hex) of a file from the digests of its chunks, in order."""
    whole = new()
    whole.update(memoryview(b"".join(digests)))
    return whole.hexdigest()


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
