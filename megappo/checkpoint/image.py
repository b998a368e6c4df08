"""Bytes of a checkpoint's files before they are written: small pieces and tensors, in the format of torch.save.

A shard file is a row of archives, each of one tensor. torch makes what surrounds the tensor's bytes; the bytes themselves are
copied once, to the file or into a snapshot.
"""

from __future__ import annotations

import ctypes
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class FileImage:
    """Content of one file as consecutive pieces. name: relative to the checkpoint. A tensor stands for its bytes, on any device."""

    name: str
    pieces: Sequence[bytes | Tensor]

    @property
    def nbytes(self) -> int:
        return sum(len(piece) if isinstance(piece, bytes) else piece.nbytes for piece in self.pieces)

    def content(self) -> Iterator[memoryview]:
        """The pieces in host memory: a tensor on the device is copied when its turn comes, one on the host is not."""
        for piece in self.pieces:
            yield memoryview(piece) if isinstance(piece, bytes) else _memory_of(as_bytes(piece).cpu())


def _memory_of(tensor: Tensor) -> memoryview:
    """Memory of a contiguous tensor [n] uint8 on the host, which lives as long as the view."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    # Not by numpy: a storage that it has seen can never be resized again, and offload resizes storages.
    array: Any = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")


def as_bytes(tensor: Tensor) -> Tensor:
    """Bytes [nbytes] uint8 of a tensor, without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def device_of(images: Sequence[FileImage]) -> torch.device:
    """Device of their tensors: the GPU, if one of them is there."""
    devices = [piece.device for image in images for piece in image.pieces if isinstance(piece, Tensor)]
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def archive(tensor: Tensor) -> list[bytes | Tensor]:
    """The archive that torch.save makes of a tensor, without the zip format's checksum of the data, which torch does not read."""
    before, after = _surroundings(tensor.dtype, tuple(tensor.shape))
    return [before, tensor, after]


def archive_bytes(tensor: Tensor) -> int:
    """Size of the archive."""
    before, after = _surroundings(tensor.dtype, tuple(tensor.shape))
    return len(before) + tensor.nbytes + len(after)


@cache  # layers repeat their shapes, and saves their layers; torch takes 0.2 ms for one
def _surroundings(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Bytes before and after the data in the archive of a tensor; they do not depend on where it lies in its file."""
    sink: Any = _Sink()
    with torch.serialization.skip_data():
        # Memory that nobody touches: the system gives none.
        torch.save(torch.empty(shape, dtype=dtype), sink)
    return sink.before.getvalue(), sink.after.getvalue()


class _Sink:
    """Binary stream that torch.save writes one archive to. Under `skip_data` torch seeks over the data."""

    def __init__(self) -> None:
        self.before, self.after = io.BytesIO(), io.BytesIO()
        self._now = self.before

    def write(self, content: bytes | memoryview) -> int:
        return self._now.write(content)

    def seek(self, distance: int, whence: int) -> None:
        assert whence == os.SEEK_CUR and self._now is self.before, "one tensor has one run of data"
        self._now = self.after

    def flush(self) -> None:
        pass
