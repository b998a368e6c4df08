"""Hashes of files in chunks, so that several threads can hash one file, on writing and on reading. Imports no torch. A file's hash
is the BLAKE3 of the concatenated binary BLAKE3 digests of its chunks of 64 MiB (the last one shorter; an empty file has none).
SHA-256 takes five times as long."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

CHUNK_BYTES = 64 << 20
_READ_BYTES = 1 << 20  # stays in a core's cache between the read and the hash


class Fingerprint(NamedTuple):
    """Size in bytes and hash (hex) of one file."""

    bytes: int
    digest: str


def cores_of_rank() -> int:
    """Return this rank's number of cores: those the process may use, divided among the ranks of the node."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def hash_file(path: Path, threads: int) -> Fingerprint:
    """Hash a file with `threads` threads. OSError if it is missing or not readable."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        starts = range(0, size, CHUNK_BYTES)
        if len(starts) <= 1 or threads == 1:
            digests = [_hash_range(file.fileno(), start) for start in starts]
        else:
            with ThreadPoolExecutor(min(threads, len(starts))) as pool:
                digests = list(pool.map(lambda start: _hash_range(file.fileno(), start), starts))
    return Fingerprint(size, combine(digests))


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
