"""Exponential moving average of the policy's weights: kept in fp32, saved with the run, put in the policy's place for a while.

Independent of engine and layout: the average lies like the parameters of `Engine.named_parameters`, and a checkpoint holds it as
rectangles of Hugging Face tensors, which any other layout or engine reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.checkpoint.ranges import sharded_box
from megappo.checkpoint.state import ReadGoingOn
from megappo.checkpoint.stored import Shape, StoredBox
from megappo.config.role_sections import EmaConfig
from megappo.engine.base import Engine
from megappo.models.pieces import Box, Piece, rectangle, sizes_of
from megappo.parallel.placement import Placement

AVERAGE = "ema"
"""Name of the average among the models of a checkpoint."""


class PolicyAverage:
    """Average of one engine's weights, a `checkpoint.state.StatefulModel` without optimizer. Methods are collective over its ranks.

    decay: average = decay * average + (1 - decay) * weights at every `update`. keep_on: memory of the average. It starts as the
    weights of the engine at construction.
    """

    head_names: tuple[str, ...] = ()

    def __init__(self, engine: Engine, decay: float, keep_on: Literal["host", "device"]) -> None:
        self._engine, self._decay, self._on_host = engine, decay, keep_on == "host"
        self._values: dict[str, Tensor] = {}
        self._save = ReadGoingOn()
        self.start()

    def start(self) -> None:
        """Start anew from the engine's weights."""
        with self._engine.eval_mode():
            for name, weights in self._engine.fp32_weights():
                self._values[name] = self._placed(weights)

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the engine's weights of now."""
        self._save.finish()
        with self._engine.eval_mode():
            for name, weights in self._engine.fp32_weights():
                average = self._values[name]
                average.lerp_(weights.detach().to(average.device), 1.0 - self._decay)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The average under the names of the engine's parameters, fp32, in the memory of `keep_on`."""
        return self._values

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the engine's parameters are the average, rounded to their type; then they are what they were, to the bit."""
        weights = self._swap(self._values)
        try:
            yield
        finally:
            self._swap(weights)

    def _swap(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put `values` into the parameters; returns what was there."""
        before = {}
        with parameters_to_change(self._engine) as parameters:
            for name, parameter in parameters.items():
                before[name] = self._placed(parameter, parameter.dtype)
                parameter.copy_(values[name])
        return before

    def _placed(self, tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """A copy in the memory of the average."""
        return tensor.detach().to("cpu" if self._on_host else tensor.device, dtype, copy=True)

    # ------------------------------------------------------------------------------------------------------ checkpoint

    @property
    def placement(self) -> Placement:
        return self._engine.placement

    @property
    def host_group(self) -> dist.ProcessGroup:
        return self._engine.host_group

    def save_state(self, *, with_optimizer: bool) -> dict[str, Any]:
        """Rectangles [rows, cols] of the Hugging Face tensors as `models.pieces.as_2d` sees them, fp32; shares their memory."""
        return {
            str(number): sharded_box(piece.hf, self._part(piece), shape, (piece.box.r0, piece.box.c0), data_copy=copy)
            for number, (piece, shape, copy) in enumerate(self._own_pieces)
        }

    def release_state(self, read: Callable[[], None] | None = None) -> None:
        self._save.begin(read)

    def state_to_load(self, *, with_optimizer: bool, with_head: bool = True) -> dict[str, Any]:
        return self.save_state(with_optimizer=with_optimizer)

    def load_state(self, state: dict[str, Any]) -> None:
        self._save.finish()
        for number, (piece, *_) in enumerate(self._own_pieces):
            self._part(piece).copy_(state[str(number)])

    def boxes_to_load(
        self, stored: Mapping[str, Shape], *, with_optimizer: bool, with_head: bool = True
    ) -> Sequence[StoredBox] | None:
        """None: every engine saves an average alike."""

    def boxes_loaded(self, saved: Mapping[str, Any]) -> None:
        raise AssertionError("an average has no boxes of another engine")

    def _part(self, piece: Piece) -> Tensor:
        return rectangle(self._values[piece.local], piece.slot, piece.row, piece.col, piece.box.rows, piece.box.cols)

    @cached_property  # of the model and its layout, which stay; the pieces of all ranks are many
    def _own_pieces(self) -> list[tuple[Piece, tuple[int, ...], int]]:
        """(piece of this rank, shape of its whole tensor, number of this rank among those with a copy of the piece)."""
        position = self.placement.position_of(dist.get_rank())
        pieces = self._engine.pieces()
        holders: dict[tuple[str, Box], set[int]] = {}
        mine: dict[tuple[str, Box], Piece] = {}
        for section in pieces.sections:
            for piece, positions in pieces.templates[section.template]:
                key = section.hf + piece.hf, piece.box
                holders.setdefault(key, set()).update(section.first + at for at in positions)
                if position - section.first in positions:
                    assert key not in mine, f"{key[0]} has two places on one rank"  # a load would fill one of them
                    mine[key] = piece._replace(hf=key[0], local=section.local + piece.local)
        shapes = sizes_of(pieces)
        return [(piece, shapes[piece.hf], sorted(holders[key]).index(position)) for key, piece in mine.items()]


@contextmanager
def parameters_to_change(engine: Engine) -> Iterator[Mapping[str, torch.nn.Parameter]]:
    """Inside, the engine's parameters are resident and may be overwritten. Collective over its ranks."""
    with torch.no_grad(), engine.eval_mode():
        engine.to("device", optimizer=False)  # what an offload left on the host will not be theirs any more
        yield engine.named_parameters()


def average_of(ema: EmaConfig | None, policy: Engine | None) -> PolicyAverage | None:
    """The average that `policy.ema` asks for; None without it, and on ranks without the policy."""
    return None if ema is None or policy is None else PolicyAverage(policy, ema.decay, ema.keep_on)
