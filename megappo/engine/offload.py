"""Offload of tensors from device memory to host memory and back, without changing their identity.

Storages are emptied in place, so parameters, their views in Megatron's flat buffers and optimizer references stay valid objects.
Works on any device; on the CPU it serves the tests.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megappo.parallel.device import pin

ALIGNMENT = 256  # bytes: storages start at multiples of it in the host buffer, as in the device's allocator


class StorageOffload:
    """A set of tensors whose storages can be offloaded to host memory.
    `tensors` is called at each offload; the host buffer is kept while it gives the same storages. Copies are queued on the current
    stream; one to the host is skipped if the host's bytes are current."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._storages: list[torch.UntypedStorage] = []
        self._sizes: list[int] = []
        self._host: HostBuffer | None = None
        self._restored: torch.Event | None = None
        self._is_offloaded = False
        self._host_is_current = False

    def offload(self) -> None:
        """Copy to the host and free the device's memory. Does nothing if already offloaded."""
        if self._is_offloaded:
            return
        storages = distinct_storages(self._tensors())
        if not storages:
            return
        if [s._cdata for s in storages] != [s._cdata for s in self._storages]:
            if self._restored is not None:
                self._restored.synchronize()  # the last copy out of the old buffer may still be running
                self._restored = None
            self._host = None  # free it before the new one is allocated
            self._storages, self._sizes = storages, [s.nbytes() for s in storages]
            self._host = HostBuffer(self._sizes, storages[0].device)
            self._host_is_current = False
        if not self._host_is_current:
            self._copy(to_host=True)
        if storages[0].device.type == "cuda":
            # The one synchronisation: the copies, and other streams that may still read the memory freed here.
            torch.cuda.synchronize(storages[0].device)
        for storage in storages:
            storage.resize_(0)
        self._is_offloaded, self._host_is_current = True, True

    def restore(self, *, to_change: bool = True) -> None:
        """Allocate again and queue the copies back; kernels queued later on the current stream run after them.
        to_change: the bytes may differ at the next offload. If resident, only record `to_change`."""
        if self._is_offloaded:
            for storage, size in zip(self._storages, self._sizes):
                storage.resize_(size)
            self._copy(to_host=False)
            self._is_offloaded = False
        if to_change:
            self._host_is_current = False

    def _copy(self, *, to_host: bool) -> None:
        assert self._host is not None
        on_gpu = self._storages[0].device.type == "cuda"
        if on_gpu and self._restored is not None:
            # The last copy from the buffer may have been queued on another stream.
            torch.cuda.current_stream(self._storages[0].device).wait_event(self._restored)
        for storage, host in zip(self._storages, self._host.parts):
            device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            (host if to_host else device).copy_(device if to_host else host, non_blocking=on_gpu)
        if on_gpu and not to_host:
            self._restored = torch.cuda.current_stream(self._storages[0].device).record_event()


class HostBuffer:
    """One block of host memory for storages of these sizes in bytes; pinned if `device` is a GPU. parts: a uint8 tensor for each.
    It takes the sizes, each rounded up to `ALIGNMENT`, and the rest of the last page."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        self.nbytes = sum(padded)
        # torch's pinned allocator would round up to powers of two, at worst twice the memory.
        whole = torch.frombuffer(mmap.mmap(-1, self.nbytes), dtype=torch.uint8)
        if device.type == "cuda":
            pin(self, whole)
        self.parts = [part[:size] for part, size in zip(whole.split(padded), sizes)]


def distinct_storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Storages of the tensors, each once, without empty ones."""
    found = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors) if storage.nbytes()}
    return list(found.values())


def without_storages_of(others: Iterable[Tensor], tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the `tensors` that share no storage with `others`, even if `others` are offloaded."""
    theirs = {tensor.untyped_storage()._cdata for tensor in others}
    yield from (tensor for tensor in tensors if tensor.untyped_storage()._cdata not in theirs)
