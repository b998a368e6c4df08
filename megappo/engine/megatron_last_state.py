"""Description of an engine's state for a save, kept for the next one while the tensors are the same.

Describing costs some dozen calls of Python for every tensor, with caches cold from training: a tenth of the time for which a save
in the background holds training. Nothing in it changes from save to save but the values in the tensors and a few plain numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor

_Memory = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]


class LastState:
    """Sharded description that was returned last. It shares memory with the tensors that it describes, offloaded ones too."""

    def __init__(self) -> None:
        self._key: tuple[bool, list[_Memory]] | None = None
        self._state: dict[str, Any] = {}

    def get(self, tensors: Sequence[Tensor], *, with_optimizer: bool) -> dict[str, Any] | None:
        """The description, if it was made of tensors that lie where these do, in this order; else None."""
        return self._state if self._key == (with_optimizer, [_memory(tensor) for tensor in tensors]) else None

    def keep(self, state: dict[str, Any], tensors: Sequence[Tensor], *, with_optimizer: bool) -> None:
        """Keep the description of these tensors in place of the one before."""
        # A layer's extra state (FP8) is no tensor of the list: nobody would see it change.
        if any(_has_content(entry) for entry in nested_values(state) if isinstance(entry, ShardedObject)):
            self._key, self._state = None, {}
        else:
            self._key, self._state = (with_optimizer, [_memory(tensor) for tensor in tensors]), state


def _has_content(entry: ShardedObject) -> bool:
    """False for the extra state of a layer without FP8, which TransformerEngine gives as an empty tensor."""
    return entry.data is not None and not (isinstance(entry.data, Tensor) and entry.data.numel() == 0)


def _memory(tensor: Tensor) -> _Memory:
    """Place of a tensor's values, and how they lie there."""
    # The storage's identity, not its memory's address: offload resizes storages. The description keeps them alive, so none takes
    # the place of another.
    storage = tensor.untyped_storage()._cdata
    return storage, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype
