"""Host memory that holds a snapshot while a writer process reads it."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable

import torch

from megappo.checkpoint.image import FileImage, as_bytes
from megappo.parallel.pinned import pin

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
