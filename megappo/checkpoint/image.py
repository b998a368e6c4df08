"""Content of a checkpoint's files before they are written: small pieces, and tensors that are copied once, to the file or to a
snapshot in memory that a writer process reads."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megappo.parallel.device import pin


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
    devices = [piece.device for image in images for piece in image.pieces if isinstance(piece, Tensor)]
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


GRANULE = 1 << 20


class SharedBuffer:
    """Block of at least `nbytes` bytes that another process can map by its `descriptor`; pinned if `device` is a GPU. OSError if
    there is too little memory."""

    # A memfd: no name that a killed rank could leave behind, and no limit by the size of /dev/shm, which containers keep small.
    def __init__(self, nbytes: int, device: torch.device) -> None:
        nbytes = (nbytes // GRANULE + 1) * GRANULE  # room for the text of numbers, which have more digits later
        self.nbytes, self._device = nbytes, device
        self.descriptor = os.memfd_create("megappo-snapshot")
        weakref.finalize(self, os.close, self.descriptor)
        os.posix_fallocate(self.descriptor, 0, nbytes)  # takes the pages now: later, too little memory would be a SIGBUS
        self._map = mmap.mmap(self.descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            pin(self, self._memory)
            self._stream = torch.cuda.Stream(device)

    def copy_of(self, images: list[FileImage]) -> Callable[[], None]:
        """Return a function, for any thread, that copies the images into the buffer one after the other. Device tensors are copied
        on a stream of their own, in the state in which the caller's stream leaves them; the function waits for it."""
        if self._stream is None:
            return lambda: self._take(images)
        stream, ready = self._stream, torch.cuda.current_stream(self._device).record_event()

        def copy() -> None:
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                self._take(images)
                stream.synchronize()

        return copy

    def _take(self, images: list[FileImage]) -> None:
        at = 0
        for image in images:
            for piece in image.pieces:
                if isinstance(piece, bytes):
                    self._map[at : at + len(piece)] = piece
                    at += len(piece)
                else:
                    self._memory[at : at + piece.nbytes].copy_(as_bytes(piece), non_blocking=piece.device.type == "cuda")
                    at += piece.nbytes
