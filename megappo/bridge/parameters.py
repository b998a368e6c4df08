"""A model of the trainer, in any layout and engine, as the destination of a transfer; a refreshed reference is one
(`trainer/refresh.py`). Rectangles are written in place; nothing is packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from megappo.bridge.destination import Destination, Inspect, Land, Shape
from megappo.bridge.move import Move
from megappo.models.pieces import Piece, PieceMap, rectangle


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
            dtypes = {parameter.dtype for parameter in own.values()}
            assert len(dtypes) <= 1, f"a transfer has one type, the parameters have {dtypes}"
            shapes = {name: Shape.of(parameter.shape) for name, parameter in own.items()}
        return Destination(tuple(self._own), (), shapes, dtypes.pop() if dtypes else torch.float32)

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
