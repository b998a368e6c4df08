"""Destination of a transfer plan: the parameters that a rank receives, in the format that its loader fills, before any packing
into kernel layouts. `vllm_layout.py` records vLLM's; a model of the trainer, as a refreshed reference is (`trainer/refresh.py`),
is written in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megappo.models.pieces import Box, Piece, PieceMap, check_tiling, rectangle, shape_as_2d


class Move(NamedTuple):
    """A rectangle of `rows` x `cols` elements of HF tensor `hf`, from (s_row, s_col) of rank `src`'s tensor `source` to (d_row,
    d_col) of rank `dst`'s tensor `target`. s_slot, d_slot: leading index of 3-D tensors, else 0. dtype: of the target, on the wire
    too. turned: the source holds the rectangle transposed."""

    step: int
    """Place in the order of all moves; moves of one step belong to tensors that different ranks hold."""
    src: int
    dst: int
    hf: str
    source: str
    s_row: int
    s_col: int
    s_slot: int
    target: str
    d_row: int
    d_col: int
    d_slot: int
    rows: int
    cols: int
    dtype: torch.dtype
    turned: bool

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def source_size(self) -> tuple[int, int]:
        return (self.cols, self.rows) if self.turned else (self.rows, self.cols)

    @property
    def num_bytes(self) -> int:
        """Return its size on the wire: whole words of 4 bytes, so that fp32 moves are aligned behind bf16 ones."""
        return -(-self.numel * self.dtype.itemsize // 4) * 4


def module_of(target: str) -> str:
    """Return a parameter's module path: "model.norm.weight" -> "model.norm"."""
    return target.rpartition(".")[0]


Land = Callable[[Move, Tensor], None]
Inspect = Callable[[str, Tensor], None]


class Shape(NamedTuple):
    """Shape of a parameter as `slots` matrices of rows x cols; [n] is 1 x n x 1 and [n, 1, k] is 1 x n x k (`pieces.rectangle`)."""

    slots: int
    rows: int
    cols: int

    @classmethod
    def of(cls, size: Sequence[int]) -> Shape:
        if len(size) == 3:
            return cls(*size) if size[1] > 1 else cls(1, size[0], size[2])
        return cls(1, *shape_as_2d(size))


class Fill(NamedTuple):
    """Box of a parameter that the loader sets to a constant, without a checkpoint tensor (padding of the vocabulary)."""

    target: str
    slot: int
    box: Box
    value: float


@dataclass(frozen=True)
class Destination:
    """Parameters of one engine rank: pieces to receive, constants to set, and shapes. dtype: of all parameters but `others`, which
    an engine keeps in more bits (corrections of experts' scores)."""

    pieces: tuple[Piece, ...]
    fills: tuple[Fill, ...]
    shapes: Mapping[str, Shape]
    dtype: torch.dtype
    others: Mapping[str, torch.dtype] = field(default_factory=dict)

    def dtype_of(self, name: str) -> torch.dtype:
        return self.others.get(name, self.dtype)

    def check_complete(self) -> None:
        """Raise ValueError unless pieces and fills cover every parameter exactly once."""
        parts: dict[tuple[str, int], list[Box]] = defaultdict(list)
        for piece in self.pieces:
            parts[piece.local, piece.slot].append(piece.place_of(piece.box))
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


class ParameterReceiver:
    """Engine and receiver in one (`sync.BridgedEngine`, `destination.WeightReceiver`) on one rank. pieces: of the model; position:
    of this rank in it. open_parameters: context with the parameters by the names of `pieces`, resident and writable; collective
    over the model's ranks."""

    def __init__(
        self, pieces: PieceMap, position: int, open_parameters: Callable[[], AbstractContextManager[Mapping[str, Tensor]]]
    ) -> None:
        self._open = open_parameters
        self._own: list[Piece] = []
        # Named by the number of the layer in the checkpoint: a description then holds each kind of layer once.
        self._local: dict[str, str] = {}
        for section in pieces.sections:
            for piece, positions in pieces.templates[section.template]:
                if position - section.first in positions:
                    name = section.hf + piece.local
                    self._own.append(piece._replace(hf=section.hf + piece.hf, local=name))
                    self._local[name] = section.local + piece.local

    @property
    def receiver(self) -> ParameterReceiver:
        return self

    def weights_changing(self) -> None:
        """Do nothing: a transfer that fails ends the run."""

    def weights_changed(self, version: int) -> None:
        """Do nothing: no results of older weights are kept."""

    def describe(self, tensors: Mapping[str, tuple[int, ...]]) -> Destination:
        """Describe this rank's parameters; `tensors` is unused, as the pieces name them."""
        with self._open() as parameters:
            own = {name: parameters[local] for name, local in self._local.items()}
            dtypes = {name: parameter.dtype for name, parameter in own.items()}
            shapes = {name: Shape.of(parameter.shape) for name, parameter in own.items()}
        return Destination(tuple(self._own), (), shapes, torch.float32, dtypes)

    @contextmanager
    def session(self, moves: Sequence[Move], inspect: Inspect | None) -> Iterator[Land]:
        left = len(moves)
        with self._open() as parameters:

            def land(move: Move, values: Tensor) -> None:
                nonlocal left
                whole = parameters[self._local[move.target]]
                rectangle(whole, move.d_slot, move.d_row, move.d_col, move.rows, move.cols).copy_(values)
                left -= 1

            yield land
            if left:
                raise RuntimeError(f"{left} of {len(moves)} rectangles of a transfer never arrived")
            if inspect is not None:
                for name, local in self._local.items():
                    inspect(name, parameters[local])
