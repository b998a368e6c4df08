"""Tensors of one engine in a checkpoint, by the names that their writer gave them, and boxes of them read into any memory.

An engine that did not write a checkpoint reads it this way (`engine/translation.py`). Only the rows that a box asks for are read
from the files: the data of a tensor lies in one piece in its archive (`image.py`), and nothing of it is unpickled. Nothing here
communicates.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megappo.checkpoint.errors import UnsafeCheckpoint
from megappo.checkpoint.safe_load import load_index, load_tensors_and_plain_data

Shape = tuple[int, ...]
_NAME_LENGTHS = slice(26, 30)  # in the header of a file in a zip archive, which is 30 bytes and these two lengths long


class StoredBox(NamedTuple):
    """Part of the stored tensor `key` that belongs in `target` [rows, cols], a view of any dtype on any device.

    row, col: of its first element in the stored tensor, seen as 2-D; a 1-D tensor is one column, and the matrices of a 3-D one are
    one below the other.
    """

    key: str
    row: int
    col: int
    target: Tensor


class _Chunk(NamedTuple):
    """A stored part of a tensor as 2-D: first row and column, rows and columns, and its archive."""

    row: int
    col: int
    rows: int
    cols: int
    dtype: torch.dtype
    place: _StorageInfo


class StoredTensors:
    """Tensors in the folder of one engine. shapes: of the whole tensors by name, without layers' extra state."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        index = load_index((directory / ".metadata").read_bytes())
        self._places = index.storage_data
        self._tensors = {key: entry for key, entry in index.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
        self.shapes: dict[str, Shape] = {key: tuple(entry.size) for key, entry in self._tensors.items()}

    def plain_values(self) -> dict[str, Any]:
        """Values of the state that are no sharded tensors."""
        path = self._directory / COMMON_STATE_FNAME
        return load_tensors_and_plain_data(path, str(path))

    def fill(self, boxes: Iterable[StoredBox]) -> None:
        """Read every box into its target. OSError, or ValueError if a box lies outside of what is stored."""
        by_key: dict[str, list[StoredBox]] = {}
        for box in boxes:
            by_key.setdefault(box.key, []).append(box)
        reads: dict[str, list[tuple[_Chunk, list[StoredBox]]]] = {}
        for key, wanted in by_key.items():
            found = 0
            for chunk in self._chunks(key):
                here = [part for box in wanted if (part := _within(box, chunk)) is not None]
                found += sum(part.target.numel() for part in here)
                if here:
                    reads.setdefault(chunk.place.relative_path, []).append((chunk, here))
            if found != (asked := sum(box.target.numel() for box in wanted)):
                raise ValueError(f"{self._directory}: {key} holds {found} of {asked} numbers that are read from it")
        for name, chunks in reads.items():
            with (self._directory / name).open("rb") as file:
                for chunk, here in sorted(chunks, key=lambda read: read[0].place.offset):
                    _read(file, chunk, here)

    def _chunks(self, key: str) -> Iterator[_Chunk]:
        entry = self._tensors[key]
        for stored in entry.chunks:
            row, col, rows, cols = _as_2d(stored.offsets, stored.sizes, entry.size)
            yield _Chunk(row, col, rows, cols, entry.properties.dtype, self._places[MetadataIndex(key, stored.offsets)])


def _as_2d(offsets: Sequence[int], sizes: Sequence[int], whole: Sequence[int]) -> tuple[int, int, int, int]:
    """(first row, first column, rows, columns) of a stored part of a tensor of the shape `whole`."""
    if len(whole) < 3:
        (row, col), (rows, cols) = (*offsets, 0)[:2], (*sizes, 1)[:2]
        return row, col, rows, cols
    matrix, row, col = offsets
    matrices, rows, cols = sizes
    assert matrices == 1 or rows == whole[1], "parts of several matrices are no block of rows"
    return matrix * whole[1] + row, col, matrices * rows, cols


def _within(box: StoredBox, chunk: _Chunk) -> StoredBox | None:
    """The part of a box that lies in a chunk."""
    rows, cols = box.target.shape
    r0, r1 = max(box.row, chunk.row), min(box.row + rows, chunk.row + chunk.rows)
    c0, c1 = max(box.col, chunk.col), min(box.col + cols, chunk.col + chunk.cols)
    if r0 >= r1 or c0 >= c1:
        return None
    return StoredBox(box.key, r0, c0, box.target[r0 - box.row : r1 - box.row, c0 - box.col : c1 - box.col])


def _read(file: BufferedReader, chunk: _Chunk, boxes: Iterable[StoredBox]) -> None:
    """Read boxes that lie in `chunk`, row by row range."""
    row_bytes = chunk.cols * chunk.dtype.itemsize
    start = _data_start(file, chunk)
    for box in boxes:
        content = bytearray(len(box.target) * row_bytes)
        file.seek(start + (box.row - chunk.row) * row_bytes)
        if file.readinto(content) != len(content):
            raise UnsafeCheckpoint(f"{file.name} ends within {box.key}; the file is not from megappo")
        rows = torch.frombuffer(content, dtype=chunk.dtype).view(-1, chunk.cols)
        first = box.col - chunk.col
        box.target.copy_(rows[:, first : first + box.target.shape[1]])


class _Archive(RawIOBase):
    """A range of a file as a file."""

    def __init__(self, file: BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        read = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)])
        self._at += read
        return read


def _data_start(file: BufferedReader, chunk: _Chunk) -> int:
    """Place in the file of the numbers of an archive of torch.save, which are stored without compression."""
    place, nbytes = chunk.place, chunk.rows * chunk.cols * chunk.dtype.itemsize
    try:
        with zipfile.ZipFile(_Archive(file, place.offset, place.length)) as archive:
            data = [entry for entry in archive.infolist() if entry.filename.endswith("/data/0")]
    except zipfile.BadZipFile:
        data = []
    if len(data) != 1 or data[0].compress_type != zipfile.ZIP_STORED or data[0].file_size != nbytes:
        raise UnsafeCheckpoint(f"{file.name} holds other things than its index says; the file is not from megappo")
    header = place.offset + data[0].header_offset
    file.seek(header)
    lengths = file.read(30)[_NAME_LENGTHS]
    return header + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
