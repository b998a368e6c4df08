"""Bytes of tensors that are alive at once while something runs, also where storages are freed and allocated in place.

FSDP2 resizes the storages of gathered weights to nothing and back, which no operator shows: their sizes are looked up after every
operator. What C++ allocates for itself (gloo's copies, temporaries inside an operator) is not seen.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def bytes_behind(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def alive_peak(work: Callable[[], object], held: Iterable[Tensor]) -> int:
    """The most bytes alive at once that `work` makes, beside those of `held`."""
    gc.collect()
    gc.disable()  # a GPU's allocator does not wait for cycles to be collected
    try:
        alive = _Alive(held)
        with alive:
            work()
    finally:
        gc.enable()
    return alive.peak


class _Alive(TorchDispatchMode):
    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self._held = {tensor.untyped_storage()._cdata for tensor in held}
        self._storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, result)):
            # Not of wrappers (DTensor), whose storages have a size and no memory.
            if type(leaf) in (Tensor, Parameter) and (storage := leaf.untyped_storage())._cdata not in self._held:
                self._storages[storage._cdata] = storage
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._storages.values()))
        return result
