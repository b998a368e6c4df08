"""Rows of token ids in files that any number of processes map: written once, in order, and read by number.

A folder holds `tokens.i32`, `lengths.i32`, `index.i64` (of each row its checksum, first token, number of
tokens, and the integers of the caller), `blocks.bin` (bytes that rows refer to) and
`meta.json`, which is written last. Only the length is checked of most files when they are opened; every row carries a checksum
of all that it is made of, and is held against it whenever it is read.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import zlib
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy

TOKENS, LENGTHS, INDEX, BLOCKS, META = "tokens.i32", "lengths.i32", "index.i64", "blocks.bin", "meta.json"
_BUFFER = 1 << 20


class DamagedRows(RuntimeError):
    """A row is not as it was written: the disk, or somebody, changed its file."""


class Block(NamedTuple):
    """Place of bytes in `blocks.bin`, and their checksum (CRC-32)."""

    start: int
    size: int
    crc: int


class RowWriter:
    """Writer of a folder; `close` completes it. OSError if the disk takes no more."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {
            name: (folder / name).open("wb", buffering=_BUFFER) for name in (TOKENS, LENGTHS, INDEX, BLOCKS)
        }
        self._num_rows = self._num_tokens = self._num_bytes = 0
        self._lengths = hashlib.sha256()

    def add_block(self, content: bytes) -> Block:
        """Append bytes for rows to refer to."""
        block = Block(self._num_bytes, len(content), zlib.crc32(content))
        self._files[BLOCKS].write(content)
        self._num_bytes += len(content)
        return block

    def add(self, tokens: Sequence[int], columns: Sequence[int]) -> None:
        """Append a row: ids below 2^31 and integers of 64 bits, as many in every row."""
        content, length = array("i", tokens).tobytes(), array("i", [len(tokens)]).tobytes()
        line = array("q", [0, self._num_tokens, len(tokens), *columns]).tobytes()
        crc = _checksum(line, content)
        self._files[INDEX].write(crc.to_bytes(8, "little") + line[8:])
        self._files[TOKENS].write(content)
        self._files[LENGTHS].write(length)
        self._lengths.update(length)
        self._num_rows += 1
        self._num_tokens += len(tokens)

    def close(self, facts: Mapping[str, Any]) -> None:
        """Complete the folder; facts: JSON-compatible, for `TokenRows.facts`."""
        for file in self._files.values():
            file.close()
        sizes = {name: (self._folder / name).stat().st_size for name in self._files}
        meta = {"num_rows": self._num_rows, "sizes": sizes, "lengths_sha256": self._lengths.hexdigest(), "facts": dict(facts)}
        # No fsync: after a crash of the machine, sizes and checksums tell files that never reached the disk.
        write_checked(self._folder / META, meta)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            try:
                file.close()
            except OSError:
                pass  # of a full disk, which the write before has told


class TokenRows:
    """Rows of a folder, mapped. lengths: [N] int32, tokens of each row. facts: as passed to `RowWriter.close`. source: of the rows,
    for messages."""

    def __init__(self, folder: Path, meta: Mapping[str, Any]) -> None:
        self.folder, self.source = folder, ""
        self.facts: Mapping[str, Any] = meta["facts"]
        self._num_rows: int = meta["num_rows"]
        self._tokens, self._index, self._blocks = (_mapped(folder / name) for name in (TOKENS, INDEX, BLOCKS))
        self.lengths = numpy.frombuffer(_mapped(folder / LENGTHS), dtype=numpy.int32)
        self._line = len(self._index) // max(1, self._num_rows)  # bytes

    @classmethod
    def open(cls, folder: Path) -> TokenRows | None:
        """Map a folder; None if there is none, it is incomplete, or a file is cut or was changed."""
        meta = read_checked(folder / META)
        if meta is None:
            return None
        try:
            if any((folder / name).stat().st_size != size for name, size in meta["sizes"].items()):
                return None
            rows = cls(folder, meta)
        except OSError:
            return None
        # Balancing reads the lengths without their rows, and differs between ranks if they do: 4 bytes a row, so checked whole.
        return rows if hashlib.sha256(rows.lengths.tobytes()).hexdigest() == meta["lengths_sha256"] else None

    def __len__(self) -> int:
        return self._num_rows

    def read(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(token ids, the caller's integers) of a row. DamagedRows if they are not as written."""
        line = self._index[row * self._line : (row + 1) * self._line]
        crc, start, length, *columns = array("q", line)
        content = self._tokens[4 * start : 4 * (start + length)]
        if crc != _checksum(line, content):
            raise self._damaged(row)
        return tuple(array("i", content)), tuple(columns)

    def read_array(self, row: int) -> numpy.ndarray:
        """[length] int32, the ids of a row as they are mapped, without the caller's integers. DamagedRows as `read`."""
        line = self._index[row * self._line : (row + 1) * self._line]
        crc, start, length, *_ = array("q", line)
        found = numpy.frombuffer(self._tokens, numpy.int32)[start : start + length]
        if crc != _checksum(line, found.data):
            raise self._damaged(row)
        return found

    def read_block(self, block: Block, row: int) -> bytes:
        """Bytes of a block that this row refers to. DamagedRows if they are not as written."""
        content = self._blocks[block.start : block.start + block.size]
        if zlib.crc32(content) != block.crc:
            raise self._damaged(row)
        return content

    def _damaged(self, row: int) -> DamagedRows:
        (self.folder / META).unlink(missing_ok=True)  # so that nobody opens it again
        of = f" of {self.source}" if self.source else ""
        what = f"row {row}{of} is not as it was written to {self.folder}"
        return DamagedRows(f"{what}, which is made anew at the next start (resume the run)")


def write_rows(folder: Path, rows: Sequence[array]) -> None:
    """Write these rows of 32-bit integers, and nothing with them."""
    with RowWriter(folder) as writer:
        for row in rows:
            writer.add(row, ())
        writer.close({})


def write_checked(path: Path, value: Any) -> None:
    """Write a JSON value with its SHA-256."""
    text = json.dumps(value, sort_keys=True)
    path.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n", encoding="utf-8")


def read_checked(path: Path) -> Any:
    """Read a value of `write_checked`; None if the file is missing, unreadable or changed."""
    try:
        digest, _, text = path.read_bytes().removesuffix(b"\n").partition(b"\n")
    except OSError:
        return None
    return json.loads(text) if hashlib.sha256(text).hexdigest().encode() == digest else None


def _checksum(line: bytes, tokens: bytes | memoryview) -> int:
    return zlib.crc32(tokens, zlib.crc32(line[8:]))  # without the checksum itself


def _mapped(path: Path) -> mmap.mmap | bytes:
    """A file's bytes, read from the disk when they are touched; an empty file cannot be mapped."""
    with path.open("rb") as file:
        size = path.stat().st_size
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
