"""What a role (policy, critic, reference) may ask of the engine that runs its model.

Roles are written against this and do not know which engine runs. The engine knows nothing of PPO: losses arrive as callables.
Batches are global: every rank passes the same packed batch and the engine takes the part that its layout needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from megappo.data.packing import PackedBatch
from megappo.parallel.context import ContextShard


@dataclass(frozen=True)
class ModelOutput:
    """What the last pipeline stage hands to a loss function for one micro-batch of T tokens.

    hidden: [T / cp, H] final hidden states ([T / cp / tp, H] under sequence parallel), None for a value model.
    weight: [V / tp, H] output projection of this rank, None for a value model. vocab_start: global id of its first row;
    num_valid: how many of its rows are real vocabulary (the rest is padding).
    values: [T] fp32 raw outputs of the value head, None for a language model.
    context: which of the T tokens this rank holds under context parallel (None: all); fields of the batch, values, per-token
    results and the loss are over all T, on every rank of the context-parallel group alike.
    """

    tp_group: torch.distributed.ProcessGroup
    sequence_parallel: bool
    hidden: Tensor | None = None
    weight: Tensor | None = None
    vocab_start: int = 0
    num_valid: int = 0
    values: Tensor | None = None
    context: ContextShard | None = None

    def own_tokens(self, x: Tensor) -> Tensor:
        """[T, ...] -> the part of the tokens of `hidden`, [T / cp, ...]."""
        return x if self.context is None else self.context.take(x)

    def all_tokens(self, x: Tensor) -> Tensor:
        """[T / cp, ...] -> [T, ...] on every rank; differentiable. Collective over the context-parallel group."""
        return x if self.context is None else self.context.gather(x)


@dataclass(frozen=True)
class LossOutput:
    """What a loss function returns for one micro-batch.

    loss_sum: scalar, the un-normalised sum (None when the pass is forward only). tokens: name -> [T] results to hand back.
    sums / maxima: name -> scalar, combined over micro-batches and data-parallel ranks by sum / max.
    """

    loss_sum: Tensor | None = None
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)


LossFunction = Callable[[ModelOutput, PackedBatch], LossOutput]


@dataclass(frozen=True)
class RouterSummary:
    """What the routers of a model with experts did in one training pass.

    tokens: [layers, experts] fp64, tokens sent to each expert (0 in dense layers). balance_loss: mean over sequences of their
    balancing losses, summed over layers, before the coefficient; 0 where that is 0.
    """

    tokens: Tensor
    balance_loss: float


@dataclass(frozen=True)
class PassResult:
    """Outcome of one pass over a global batch, identical on every rank. tokens: name -> [T] fp32 in the batch's order.

    router: of a training pass of a model with experts.
    """

    tokens: dict[str, Tensor]
    sums: dict[str, float]
    maxima: dict[str, float]
    num_micro_batches: int
    router: RouterSummary | None = None


@dataclass(frozen=True)
class StepResult:
    """grad_norm: global L2 norm before clipping. applied: False when it was not finite and the step was skipped on all ranks."""

    grad_norm: float
    applied: bool


class Engine(Protocol):
    """One model, sharded, with its optimizer if it has one. All methods are collective over the role's ranks."""

    def train_mode(self) -> AbstractContextManager[None]:
        """Parameters and gradients are resident and dropout is on inside; offloads on exit what the role offloads."""

    def eval_mode(self) -> AbstractContextManager[None]:
        """Parameters are resident inside, gradients are not recorded."""

    def forward_backward(
        self,
        batch: PackedBatch,
        loss_fn: LossFunction,
        *,
        reads: Collection[str] = (),
        denominator: float = 1.0,
        forward_only: bool = False,
    ) -> PassResult:
        """Run the micro-batches of the global batch; gradients of sum(loss_sum) / denominator are accumulated and reduced.

        reads: fields of the batch that loss_fn looks at, where the batch has them. No others go to the device, and asking a
        micro-batch for one of them is a KeyError.
        """

    def shard_data(self, batch: PackedBatch) -> list[PackedBatch]:
        """This data-parallel rank's micro-batches, the same number on every rank."""

    def unshard_data(self, batch: PackedBatch, tokens: list[Mapping[str, Tensor]], names: list[str]) -> dict[str, Tensor]:
        """Per-token results of the local micro-batches -> [T] in the global batch's order, on every rank."""

    def optimizer_zero_grad(self) -> None: ...

    def optimizer_step(self) -> StepResult: ...

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one optimizer step; returns the learning rate that this step uses."""

    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        """Move to "host" (offloaded) or "device" (resident)."""

    def save_state(self, *, with_optimizer: bool) -> dict[str, Any]:
        """Sharded state for the checkpoint writer."""

    def release_state(self) -> None:
        """What `save_state` returned has been written."""

    def state_to_load(self, *, with_optimizer: bool, with_head: bool = True) -> dict[str, Any]:
        """Description of the state, for the checkpoint reader to fill; without `with_head` the model keeps its own head."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state_to_load` described, after the checkpoint reader filled it."""
