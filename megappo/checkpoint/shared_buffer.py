"""Host memory that holds a snapshot while a writer process reads it."""

from __future__ import annotations

import mmap
import os
import weakref

import torch

from megappo.checkpoint.image import FileImage, as_bytes
from megappo.platform.pinned import pin

GRANULE = 1 << 20


class SharedBuffer:
    """Block of at least `nbytes` bytes that another process can map by its `descriptor`; pinned if `device` is a GPU.

    OSError if the memory is not there.
    """

    # A memfd: no name that a killed rank could leave behind, and no limit by the size of /dev/shm, which containers keep small.
    def __init__(self, nbytes: int, device: torch.device) -> None:
        nbytes = (nbytes // GRANULE + 1) * GRANULE  # room for the text of numbers, which have more digits later
        self.nbytes, self._device = nbytes, device
        self.descriptor = os.memfd_create("megappo-snapshot")
        weakref.finalize(self, os.close, self.descriptor)
        os.posix_fallocate(self.descriptor, 0, nbytes)  # takes the pages now: later, too little memory would be a SIGBUS
        self._map = mmap.mmap(self.descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        if device.type == "cuda":
            pin(self, self._memory)

    def take(self, images: list[FileImage]) -> list[int]:
        """Copy the images into the buffer, one behind the other; returns where they begin. Waits for the device at the end."""
        starts, at = [], 0
        for image in images:
            starts.append(at)
            for piece in image.pieces:
                if isinstance(piece, bytes):
                    self._map[at : at + len(piece)] = piece
                    at += len(piece)
                else:
                    self._memory[at : at + piece.nbytes].copy_(as_bytes(piece), non_blocking=piece.device.type == "cuda")
                    at += piece.nbytes
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return starts
