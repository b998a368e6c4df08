"""Destination of a transfer plan: the parameters that an engine rank receives, in the format that its loader fills, before any
packing into kernel layouts. `vllm_layout.py` records vLLM's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megappo.bridge.move import Move
from megappo.models.pieces import Box, Piece, check_tiling

Land = Callable[[Move, Tensor], None]
Inspect = Callable[[str, Tensor], None]


class Shape(NamedTuple):
    """Shape of a parameter as `slots` matrices of rows x cols; [n] is 1 x n x 1."""

    slots: int
    rows: int
    cols: int

    @classmethod
    def of(cls, size: Sequence[int]) -> Shape:
        if len(size) == 3:
            return cls(*size)
        rows, cols = (*size, 1)[:2]  # [n] is a column
        return cls(1, rows, cols)

    def flat_index(self, slot: int, row: int, col: int) -> int:
        return (slot * self.rows + row) * self.cols + col


class Fill(NamedTuple):
    """Box of a parameter that the loader sets to a constant, without a checkpoint tensor (padding of the vocabulary)."""

    target: str
    slot: int
    box: Box
    value: float


@dataclass(frozen=True)
class Destination:
    """Parameters of one engine rank: pieces to receive, constants to set, and shapes."""

    pieces: tuple[Piece, ...]
    fills: tuple[Fill, ...]
    shapes: Mapping[str, Shape]
    dtype: torch.dtype

    def check_complete(self) -> None:
        """Raise ValueError unless pieces and fills cover every parameter exactly once."""
        parts: dict[tuple[str, int], list[Box]] = defaultdict(list)
        for piece in self.pieces:
            place = Box(piece.row, piece.row + piece.box.rows, piece.col, piece.col + piece.box.cols)
            parts[piece.local, piece.slot].append(place)
        for fill in self.fills:
            parts[fill.target, fill.slot].append(fill.box)
        for name, shape in self.shapes.items():
            for slot in range(shape.slots):
                check_tiling(Box(0, shape.rows, 0, shape.cols), parts.get((name, slot), []), f"engine parameter {name}")


class WeightReceiver(Protocol):
    """The engine's end of a transfer on one rank."""

    def describe(self, tensors: Mapping[str, tuple[int, ...]]) -> Destination:
        """Return this rank's destination for Hugging Face tensors of these names and shapes."""
        ...

    def session(self, moves: Sequence[Move], inspect: Inspect | None) -> AbstractContextManager[Land]:
        """Open the engine for exactly these moves; the body passes each as (move, [rows, cols] tensor of any float dtype).
        `inspect(name, tensor)` gets every completed parameter, in loader format. RuntimeError at the end if a move is missing.
        After any error the engine's weights are undefined."""
        ...
