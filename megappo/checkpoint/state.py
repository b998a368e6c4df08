"""The two kinds of state in a checkpoint, as protocols; `engine.base.Engine` extends the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

Shape = tuple[int, int]
"""Rows and columns of a stored tensor. A vector is one column; the matrices of a 3-D tensor lie one below the other."""


class StateBox(NamedTuple):
    """Rectangle of the stored tensor `key`, from (row, col) on. values: [rows, cols], a view of any memory."""

    key: str
    row: int
    col: int
    values: Tensor


@dataclass(frozen=True)
class ModelState:
    """State of a model on one rank."""

    boxes: Sequence[StateBox]
    """What this rank writes, in the same memory at every save; together the ranks write every element once."""
    tensors: Mapping[str, Tensor]
    """All state of this rank, by names for messages."""
    position: Mapping[str, int]
    """Plain numbers, equal on all ranks."""


class StatefulModel(Protocol):
    """A sharded model with its optimizer; tensor names and shapes do not depend on layout and engine. All methods are collective
    over the ranks that the model lives on."""

    @property
    def host_group(self) -> dist.ProcessGroup:
        """Host group of the model's ranks; the world's if it lives on all ranks."""
        ...

    def save_state(self, *, with_optimizer: bool) -> ModelState:
        """Return the state for the checkpoint writer, which shares its memory. Exchanges nothing with other ranks."""
        ...

    def release_state(self, read: Callable[[], None] | None = None) -> None:
        """Note that the state from `save_state` was read; its memory may be offloaded again. read: returns once another thread has
        finished reading; called before the state changes or moves, or at once. It exchanges and raises nothing."""

    def boxes_to_load(self, stored: Mapping[str, Shape], *, with_optimizer: bool, with_head: bool = True) -> Sequence[StateBox]:
        """Return the boxes of the stored tensors that are this rank's state, to be filled in place. stored: shapes of the
        checkpoint's tensors by name. with_head: with output projection or value head; without it the model keeps its own, and the
        checkpoint may have another one or none. ValueError, the same on every rank, if the tensors are not the model's."""
        ...

    def boxes_loaded(self, position: Mapping[str, int]) -> None:
        """Continue from the filled boxes of `boxes_to_load`. position: of the writer's optimizer, empty without one."""


class ReadGoingOn:
    """A read of a model's state that may still run in another thread; see `StatefulModel.release_state`."""

    def __init__(self) -> None:
        self._read: Callable[[], None] | None = None

    def begin(self, read: Callable[[], None] | None) -> None:
        """Register a read, after waiting for the one before; None: there is none."""
        if read is not None:
            self.finish()
            self._read = read

    def finish(self) -> None:
        """Wait for its end. Call it before the state changes or moves."""
        read, self._read = self._read, None
        if read is not None:
            read()


class StatefulComponent(Protocol):
    """A small component whose state is equal on every rank: strings, numbers, lists and dicts with string keys."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
