"""An engine that forwards every call to another one: the base of engines that change or record a part of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.checkpoint.state import ModelState, Shape, StateBox
from megappo.data.packing import PackedBatch
from megappo.data.tokenizers import Tokenizer
from megappo.engine.base import Engine, LossFunction, PassResult, StepResult
from megappo.models.arch import ModelArch
from megappo.models.lora import Weights
from megappo.models.pieces import PieceMap
from megappo.parallel.placement import Placement
from megappo.parallel.shares import Shares


class DelegatingEngine:
    """Forward every method of `engine.base.Engine` to the wrapped engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def placement(self) -> Placement:
        return self._engine.placement

    @property
    def host_group(self) -> dist.ProcessGroup:
        return self._engine.host_group

    @property
    def arch(self) -> ModelArch:
        return self._engine.arch

    @property
    def value_head(self) -> bool:
        return self._engine.value_head

    @property
    def shares(self) -> Shares:
        return self._engine.shares

    def named_parameters(self) -> Mapping[str, torch.nn.Parameter]:
        return self._engine.named_parameters()

    def named_gradients(self) -> Mapping[str, Tensor]:
        return self._engine.named_gradients()

    def main_parameters(self) -> Mapping[str, Tensor]:
        return self._engine.main_parameters()

    def fp32_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._engine.fp32_weights()

    def merged_parameters(self) -> Weights:
        return self._engine.merged_parameters()

    def without_adapters(self) -> AbstractContextManager[None]:
        return self._engine.without_adapters()

    def pieces(self) -> PieceMap:
        return self._engine.pieces()

    def adapter_pieces(self) -> PieceMap:
        return self._engine.adapter_pieces()

    def export(self, directory: Path, source: Path, tokenizer: Tokenizer | None = None) -> None:
        self._engine.export(directory, source, tokenizer)

    def to(self, device: Literal["host", "device"], *, model: bool = True, optimizer: bool = True) -> None:
        self._engine.to(device, model=model, optimizer=optimizer)

    def train_mode(self) -> AbstractContextManager[None]:
        return self._engine.train_mode()

    def eval_mode(self) -> AbstractContextManager[None]:
        return self._engine.eval_mode()

    def forward_backward(
        self,
        share: PackedBatch,
        loss_fn: LossFunction,
        *,
        reads: Collection[str] = (),
        denominator: float = 1.0,
        forward_only: bool = False,
    ) -> PassResult:
        return self._engine.forward_backward(share, loss_fn, reads=reads, denominator=denominator, forward_only=forward_only)

    def optimizer_zero_grad(self) -> None:
        self._engine.optimizer_zero_grad()

    def optimizer_step(self) -> StepResult:
        return self._engine.optimizer_step()

    def lr_scheduler_step(self) -> float:
        return self._engine.lr_scheduler_step()

    def save_state(self, *, with_optimizer: bool) -> ModelState:
        return self._engine.save_state(with_optimizer=with_optimizer)

    def release_state(self, read: Callable[[], None] | None = None) -> None:
        self._engine.release_state(read)

    def boxes_of(self, values: Mapping[str, Tensor], *, to_save: bool) -> Sequence[StateBox]:
        return self._engine.boxes_of(values, to_save=to_save)

    def boxes_to_load(self, stored: Mapping[str, Shape], *, with_optimizer: bool, with_head: bool = True) -> Sequence[StateBox]:
        return self._engine.boxes_to_load(stored, with_optimizer=with_optimizer, with_head=with_head)

    def boxes_loaded(self, position: Mapping[str, int]) -> None:
        self._engine.boxes_loaded(position)
