"""What an engine rank wants to receive, as values: the far side of a transfer plan.

An engine describes its parameters in the format its loader fills (before any packing into kernel layouts). Pure values; vLLM's
description of itself is recorded in `vllm_layout.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megappo.bridge.plan import Move, check_tiling
from megappo.models.pieces import Box, Piece, as_2d

Land = Callable[[Move, Tensor], None]
Inspect = Callable[[str, Tensor], None]


class Shape(NamedTuple):
    """A parameter seen as `slots` matrices of rows x cols; [n] is 1 x n x 1."""

    slots: int
    rows: int
    cols: int

    @classmethod
    def of(cls, size: Sequence[int]) -> Shape:
        if len(size) == 3:
            return cls(*size)
        rows, cols = (*size, 1)[:2]
        return cls(1, rows, cols)

    def flat_index(self, slot: int, row: int, col: int) -> int:
        return (slot * self.rows + row) * self.cols + col


class Fill(NamedTuple):
    """A box of a parameter that no checkpoint tensor reaches and the loader sets to a constant (padding of the vocabulary)."""

    target: str
    slot: int
    box: Box
    value: float


@dataclass(frozen=True)
class Destination:
    """One engine rank's parameters: pieces to receive, constants to set, shapes, and the order in which modules are loaded."""

    pieces: tuple[Piece, ...]
    fills: tuple[Fill, ...]
    shapes: Mapping[str, Shape]
    modules: tuple[str, ...]
    dtype: torch.dtype

    def check_complete(self) -> None:
        """Raises ValueError unless pieces and fills cover every parameter exactly once."""
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
        """What this rank wants of Hugging Face tensors of these names and shapes."""

    def session(self, moves: Sequence[Move], inspect: Inspect | None) -> AbstractContextManager[Land]:
        """Opens the engine for exactly these moves; the body hands each over as (move, [rows, cols] tensor of any float dtype).

        `inspect(name, tensor)` sees every parameter once complete, in loader format. Raises RuntimeError at the end when a move
        is missing. After any error the engine's weights are undefined."""


def rectangle(tensor: Tensor, slot: int, row: int, col: int, rows: int, cols: int) -> Tensor:
    """[rows, cols] view of a 1-D, 2-D or 3-D tensor."""
    matrix = tensor[slot] if tensor.dim() == 3 else as_2d(tensor)
    return matrix[row : row + rows, col : col + cols]
