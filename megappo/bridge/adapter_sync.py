"""Brings a policy's adapters alone into the rollout engine: the frozen weights once, then A and B of all modules at every push.
Every engine rank gets all adapters, which are small; vLLM shards them over its tp ranks. One all-reduce carries them: a number is
on the first policy rank that holds it and zero elsewhere, added as integers, so its bits stay."""

from __future__ import annotations

import time
from collections.abc import Mapping
from copy import copy
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.bridge.checksum import rectangle_sum
from megappo.bridge.sync import BridgedEngine, OtherWeights, Route, WeightSource, WeightSync
from megappo.bridge.wire import Wire
from megappo.models.pieces import Piece, PieceMap, as_2d, rectangle
from megappo.models.weight_rules import Shape

_WORD = torch.int32  # of the sum
_ROW = 1024  # words, to a multiple of which the buffer is padded: its checksum is that of a matrix of such rows
_BLOCK = 512  # bytes of a block of the checksum


class Pieces(Protocol):
    def pieces(self) -> PieceMap: ...


class AdapterSource(WeightSource, Protocol):
    """A policy with adapters: every `engine.base.Engine` that has them."""

    def named_parameters(self) -> Mapping[str, Tensor]: ...

    @property
    def adapters(self) -> Pieces | None: ...


class AdaptedEngine(BridgedEngine, Protocol):
    """A rollout engine that applies adapters itself."""

    def take_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the adapter by these tensors, which the engine may keep: in its dtype, named as in `models.lora`."""
        ...


class AdapterSync:
    """Pushes the adapters of `policy` into `engine`, in place of a `WeightSync`. base: pushes the frozen weights
    (`OtherWeights`). policy, engine: None on a rank that is not at that end. position: of this rank in the policy's layout.
    shapes: of all adapter tensors, equal on every rank. dtype: the engine's."""

    def __init__(
        self,
        base: WeightSync,
        policy: AdapterSource | None,
        engine: AdaptedEngine | None,
        position: int | None,
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._base, self._policy, self._engine, self._wire = base, policy, engine, Wire(device, None)
        self._shapes, self._dtype = dict(shapes), dtype
        adapters = None if policy is None else policy.adapters
        self._mine = () if adapters is None or position is None else first_held(adapters.pieces(), position)
        self._has_base = False

    def rerouted(self, destinations: tuple[int, ...]) -> AdapterSync:
        """Return as `WeightSync.rerouted`; the frozen weights are pushed again, as an engine may be new."""
        other = copy(self)
        other._has_base, other._base, other._wire = False, self._base.rerouted(destinations), Wire(self._wire.device, None)
        return other

    def push(self, version: int, verify: bool = True) -> dict[str, float]:
        """Push like `WeightSync.push`. Bytes are those of adapters, and of the frozen weights at the first push. Collective."""
        found = {} if self._has_base else self._base.push(version, verify)
        self._has_base = True
        started = time.perf_counter()
        whole, sent = self._own_parts()
        dist.all_reduce(whole.view(_WORD), group=self._wire.group)
        sums = int(rectangle_sum(whole.view(_WORD).view(-1, _ROW), _BLOCK)) if verify else 0
        low, high = (self._wire.reduce([sums], op)[0] for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX))
        if low != high:
            raise RuntimeError(f"push of weights {version}: the ranks received different adapters")
        if self._engine is not None:
            self._engine.weights_changing()
            self._engine.take_adapter(self._named(whole))
            self._engine.weights_changed(version)
        own = {
            "bytes_sent": float(sent),
            "bytes_received": float(whole.nbytes if self._engine is not None else 0),
            "bytes_local": 0.0,
            "seconds": time.perf_counter() - started,
        }
        return {
            **{name: value + found.get(name, 0.0) for name, value in own.items()},
            "verified": float(verify),
            "version": float(version),
        }

    def _own_parts(self) -> tuple[Tensor, int]:
        """Return all adapters end to end, zero but for this rank's parts, and the bytes of these parts."""
        numbers = sum(map(prod, self._shapes.values()))
        row = _ROW * _WORD.itemsize // self._dtype.itemsize
        whole = torch.zeros(-(-numbers // row) * row, dtype=self._dtype, device=self._wire.device)
        parameters = {} if self._policy is None else self._policy.named_parameters()
        tensors, sent = self._named(whole), 0
        for piece in self._mine:
            box = piece.box
            values = rectangle(parameters[piece.local].detach(), piece.slot, piece.row, piece.col, box.rows, box.cols)
            as_2d(tensors[piece.hf])[box.r0 : box.r1, box.c0 : box.c1] = values
            sent += box.area * self._dtype.itemsize
        return whole, sent

    def _named(self, whole: Tensor) -> dict[str, Tensor]:
        sizes = [prod(shape) for shape in self._shapes.values()]
        parts = whole[: sum(sizes)].split(sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts)}


def first_held(pieces: PieceMap, position: int) -> tuple[Piece, ...]:
    """Return the pieces that `position` holds and no lower position does: over all positions, every rectangle once."""
    lowest: dict[tuple[str, tuple[int, ...]], int] = {}
    for section in pieces.sections:
        for piece, positions in pieces.templates[section.template]:
            key = section.hf + piece.hf, tuple(piece.box)
            first = section.first + positions[0]
            lowest[key] = min(first, lowest.get(key, first))
    return tuple(piece for piece in pieces[position] if lowest[piece.hf, tuple(piece.box)] == position)


def sync_of(
    policy: AdapterSource | None,
    engine: AdaptedEngine | None,
    route: Route,
    device: torch.device,
    dtype: torch.dtype,
    shapes: Mapping[str, Shape] | None = None,
) -> WeightSync | AdapterSync:
    """Build the push of a policy: of its weights with adapters merged, or of its adapters alone if their `shapes` are given.
    Collective. policy, engine: None on a rank that is not at that end. dtype: the engine's."""
    if shapes is None:
        return WeightSync(policy, engine, route, device)
    base = WeightSync(None if policy is None else OtherWeights(policy, policy.named_parameters), engine, route, device)
    rank = dist.get_rank()
    position = route.sources.index(rank) if rank in route.sources else None
    return AdapterSync(base, policy, engine, position, shapes, dtype, device)
