"""Moves tensors out of device memory and back without changing their identity.

The storage is emptied in place, so parameters, their views in Megatron's flat buffers and optimizer references stay valid objects;
only their bytes live in host memory meanwhile. Works on any device, also on the CPU (where it moves memory for the tests' sake).
"""

from __future__ import annotations

from typing import Callable, Iterable

import torch
from torch import Tensor


class StorageOffload:
    """Bytes of a set of tensors that can be parked in host memory.

    `tensors` is asked anew at each offload: optimizer state appears late.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._parked: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def offload(self) -> None:
        """Copy to host and free. Does nothing when already offloaded."""
        if self._parked:
            return
        seen: set[int] = set()
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            pinned = storage.device.type == "cuda"
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage()
            host.copy_(storage)
            self._parked.append((storage, host))
        for storage, _ in self._parked:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate again and copy back. Does nothing when resident."""
        for storage, host in self._parked:
            storage.resize_(host.nbytes())
            storage.copy_(host)
        self._parked = []


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of the storages behind the tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
