"""The two kinds of state in a checkpoint, as protocols: of a model, which `engine.base.Engine` extends and which is searched for
NaN before a save; and of a small component, which is equal on all ranks and unchanged by a trip through JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.checkpoint.manifest import STATE, UnsafeCheckpoint
from megappo.parallel.consensus import RankFault, on_rank_zero
from megappo.parallel.layout import Placement
from megappo.runtime.messages import first_line, parse_object

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
    """Boxes that this rank writes, in the same memory at every save; together the ranks write every element once."""
    tensors: Mapping[str, Tensor]
    """All state of this rank, by names for messages."""
    position: Mapping[str, int]
    """Plain numbers, equal on all ranks."""


class StatefulModel(Protocol):
    """A sharded model with its optimizer; tensor names and shapes do not depend on layout and engine. All methods are collective
    over the ranks that the model lives on. with_optimizer: of a frozen model, which has none, nothing more is saved or loaded."""

    @property
    def placement(self) -> Placement:
        """Ranks of the model."""
        ...

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


class AveragedModel(StatefulModel, Protocol):
    """A stateful model that says also where an average of its parameters stands in a checkpoint."""

    def boxes_of(self, values: Mapping[str, Tensor], *, to_save: bool) -> Sequence[StateBox]:
        """Return the boxes of Hugging Face tensors that `values`, by parameter name and in the parameters' shapes, make up. Not
        collective. to_save: only those that this rank writes to a checkpoint."""
        ...


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


def encode_components(components: Mapping[str, StatefulComponent]) -> dict[str, str]:
    """Encode every component's state on this rank as JSON. ValueError if one is not plain data. Not collective."""
    return {name: _encode(name, component.state_dict()) for name, component in components.items()}


def digests(encoded: Mapping[str, str]) -> dict[str, bytes]:
    """Return the SHA-256 of every component's state, for `require_equal`."""
    return {name: hashlib.sha256(text.encode()).digest() for name, text in encoded.items()}


def require_equal(everyone: Sequence[Mapping[str, bytes]]) -> None:
    """Raise RankFault if a component's state differs between ranks. everyone: the digests of all ranks, so all raise or none."""
    for name, digest in everyone[0].items():  # only rank 0's is written, so the others must equal it
        differing = [rank for rank, theirs in enumerate(everyone) if theirs.get(name) != digest]
        if differing:
            raise RankFault(f"state of {name} on ranks {differing} differs from rank 0's")


def file_content(encoded: Mapping[str, str]) -> bytes:
    return json.dumps({name: json.loads(text) for name, text in encoded.items()}, indent=1).encode()


def _encode(name: str, state: dict[str, Any]) -> str:
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"state of {name} is not plain data: {error}") from None
    if json.loads(text) != state:
        raise ValueError(f"state of {name} changes on the way through JSON (tuples, or keys that are not strings)")
    return text


def read_components(source: Path, components: Mapping[str, StatefulComponent]) -> dict[str, Any]:
    """Read the state of every component from checkpoint `source`. Collective. ValueError if it holds other components or is no JSON
    object."""
    # Rank 0 reads for all: a rank that failed alone would leave the others waiting.
    state = parse_object(on_rank_zero("reading the trainer's state", (source / STATE).read_bytes), f"{source.name}/{STATE}")
    if state.keys() != components.keys():
        raise ValueError(
            f"{source.name} holds the state of {sorted(state)}, this run has {sorted(components)}; resume with the same megappo"
        )
    return state


def load_components(components: Mapping[str, StatefulComponent], state: Mapping[str, Any], source: Path) -> None:
    """Restore every component from what `read_components` has read. UnsafeCheckpoint if one finds other content than it writes."""
    for name, component in components.items():
        try:
            component.load_state_dict(state[name])
        except (AttributeError, IndexError, KeyError, TypeError) as error:  # alike on every rank: the state is
            why = f"the state of {name} is not what megappo writes ({first_line(error, kind=True)})"
            raise UnsafeCheckpoint(f"{source.name}/{STATE}: {why}; the file is not from megappo") from error


def non_finite_tensors(model: StatefulModel, *, with_optimizer: bool) -> list[str]:
    """Name this rank's parameters, moments and main parameters that are not finite. Collective, as `save_state` is."""
    state = model.save_state(with_optimizer=with_optimizer)
    try:
        named = [(name, tensor) for name, tensor in state.tensors.items() if tensor.numel()]
        if not named:
            return []
        # aminmax passes NaN on in one pass without a temporary: ten times as fast as isfinite() on a CPU. One answer for all
        # tensors means one wait for the device.
        device = named[0][1].device
        bounds = torch.stack([bound.float().to(device) for _, tensor in named for bound in tensor.detach().aminmax()])
        return [name for (name, _), finite in zip(named, bounds.isfinite().view(-1, 2).all(1).tolist()) if not finite]
    finally:
        model.release_state()
