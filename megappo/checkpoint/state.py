"""The two kinds of state that a checkpoint holds, as protocols: `engine.base.Engine` extends the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist

from megappo.checkpoint.stored import Shape, StoredBox


class StatefulModel(Protocol):
    """A sharded model with its optimizer. All methods are collective over the ranks that it lives on.

    State is a dict. A tensor that ranks hold in parts stands in it as a ShardedTensor, Megatron-core's, whose format
    `checkpoint/sharded.py` writes; everything else, plain tensors too, is equal on all of them.
    """

    @property
    def host_group(self) -> dist.ProcessGroup:
        """Group of the model's ranks for exchanges on the host; the world's if it lives on all ranks."""
        ...

    @property
    def head_names(self) -> tuple[str, ...]:
        """Keys of what may stand on top of a model (output projection, value head), whether this one has it or not."""
        ...

    def save_state(self, *, with_optimizer: bool) -> dict[str, Any]:
        """Sharded state for the checkpoint writer, described anew at every call: it tells the writer what changed.

        Nothing is exchanged with other ranks, so that a save needs one agreement for everything.
        """
        ...

    def release_state(self, read: Callable[[], None] | None = None) -> None:
        """The state that `save_state` returned was read: memory that it occupied may be offloaded again.

        read: returns once it is, for another thread still reads it. Called before the state changes or moves, or at once; it
        exchanges nothing and raises nothing.
        """

    def state_to_load(self, *, with_optimizer: bool, with_head: bool = True) -> dict[str, Any]:
        """Description of the state, for the checkpoint reader to fill; without `with_head` the model keeps its own head."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state_to_load` described, after the checkpoint reader filled it."""

    def boxes_to_load(
        self, stored: Mapping[str, Shape], *, with_optimizer: bool, with_head: bool = True
    ) -> Sequence[StoredBox] | None:
        """Parts of another engine's tensors that are this rank's state; None if `state_to_load` describes them.

        stored: shapes of the checkpoint's tensors by name. ValueError, the same on every rank, if they are not those of the model.
        """
        ...

    def boxes_loaded(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `boxes_to_load` described, now filled. saved: the writer's plain values, none without optimizer."""


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
