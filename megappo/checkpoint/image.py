"""Content of a checkpoint's files before they are written: small pieces, and tensors that are copied once, to the file or a
snapshot."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class FileImage:
    """Content of one file as consecutive pieces; a tensor, on any device, stands for its bytes. name: relative to the
    checkpoint."""

    name: str
    pieces: Sequence[bytes | Tensor]

    @property
    def nbytes(self) -> int:
        return sum(len(piece) if isinstance(piece, bytes) else piece.nbytes for piece in self.pieces)

    def content(self) -> Iterator[memoryview]:
        """Yield the pieces in host memory. A device tensor is copied when its turn comes, a host tensor is not."""
        for piece in self.pieces:
            yield memoryview(piece) if isinstance(piece, bytes) else _memory_of(as_bytes(piece).cpu())


def _memory_of(tensor: Tensor) -> memoryview:
    """View a contiguous host tensor [n] uint8 as memory; the view keeps it alive."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    # Not by numpy: a storage that it has seen can never be resized again, and offload resizes storages.
    array: Any = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")


def as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor as [nbytes] uint8, without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def device_of(images: Sequence[FileImage]) -> torch.device:
    """Return the GPU if one of the tensors is there, else the CPU."""
    devices = [piece.device for image in images for piece in image.pieces if isinstance(piece, Tensor)]
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
