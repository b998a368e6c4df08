"""The two kinds of state that a checkpoint holds, as protocols: `engine.base.Engine` extends the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

Shape = tuple[int, int]
"""Rows and columns of a stored tensor. One of one dimension is one column, the matrices of one of three are one below the other."""


class StateBox(NamedTuple):
    """Rectangle of the stored tensor `key`: values [rows, cols], a view of any memory, are its elements from (row, col) on."""

    key: str
    row: int
    col: int
    values: Tensor


@dataclass(frozen=True)
class ModelState:
    """State of a model on one rank. boxes: what this rank writes, in the same place at every save; the ranks together write every
    element once. tensors: all that this rank has of it, by names for messages. position: plain numbers, equal on all ranks.
    """

    boxes: Sequence[StateBox]
    tensors: Mapping[str, Tensor]
    position: Mapping[str, int]


class StatefulModel(Protocol):
    """A sharded model with its optimizer, whose tensors have the same names and shapes in every layout and under every engine.

    All methods are collective over the ranks that the model lives on.
    """

    @property
    def host_group(self) -> dist.ProcessGroup:
        """Group of the model's ranks for exchanges on the host; the world's if it lives on all ranks."""
        ...

    def save_state(self, *, with_optimizer: bool) -> ModelState:
        """State for the checkpoint writer, which shares its memory. Nothing is exchanged with other ranks, so that a save needs one
        agreement for everything.
        """
        ...

    def release_state(self, read: Callable[[], None] | None = None) -> None:
        """The state that `save_state` returned was read: memory that it occupied may be offloaded again.

        read: returns once it is, for another thread still reads it. Called before the state changes or moves, or at once; it
        exchanges nothing and raises nothing.
        """

    def boxes_to_load(self, stored: Mapping[str, Shape], *, with_optimizer: bool, with_head: bool = True) -> Sequence[StateBox]:
        """Boxes of the stored tensors, to be filled in place, that are this rank's state.

        stored: shapes of the checkpoint's tensors by name. with_head: also what stands on top of the model (output projection,
        value head); without it the model keeps its own, and the checkpoint may have another one or none. ValueError, the same on
        every rank, if the tensors are not those of the model.
        """
        ...

    def boxes_loaded(self, position: Mapping[str, int]) -> None:
        """Go on from what `boxes_to_load` described, now filled. position: of the writer's optimizer, empty without one."""


class ReadGoingOn:
    """The read of a model's state that another thread may still be at; see `StatefulModel.release_state`."""

    def __init__(self) -> None:
        self._read: Callable[[], None] | None = None

    def begin(self, read: Callable[[], None] | None) -> None:
        """There is one more; None: there is none."""
        if read is not None:
            self.finish()
            self._read = read

    def finish(self) -> None:
        """Wait for its end. What changes the state, or moves it, calls this first."""
        read, self._read = self._read, None
        if read is not None:
            read()


class StatefulComponent(Protocol):
    """Something small with state that is the same on every rank: strings, numbers, lists and dicts with string keys."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
