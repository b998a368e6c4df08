"""Interface of an engine: the model of a role (policy, critic, reference) with its optimizer, for any sharding.

Only `build.py` names the engine that runs. An engine knows nothing of PPO: losses arrive as callables. Model replicas share a batch
(`parallel/shares.py`): every rank passes the share of its replica.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from megappo.checkpoint.state import AveragedModel
from megappo.data.packing import PackedBatch
from megappo.data.tokenizers import Tokenizer
from megappo.engine.losses import LossFunction
from megappo.models.arch import ModelArch
from megappo.models.lora import Weights
from megappo.models.pieces import PieceMap
from megappo.parallel.shares import Shares


@dataclass(frozen=True)
class RouterSummary:
    """Load of the routers of a model with experts in one training pass."""

    tokens: Tensor
    """[layers, experts] fp64, tokens sent to each expert; 0 in dense layers."""
    balance_loss: float
    """Mean over sequences of their balancing losses, summed over layers, before the coefficient; 0 if the coefficient is 0."""


@dataclass(frozen=True)
class PassResult:
    """Results of one pass. All but `tokens` are of all replicas, identical on every rank."""

    tokens: dict[str, Tensor]
    """Name -> [T] fp32 in the order of this replica's share; zeros on ranks that do not report them."""
    sums: dict[str, float]
    maxima: dict[str, float]
    num_micro_batches: int
    router: RouterSummary | None = None
    """Set by a training pass of a model with experts."""


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step."""

    grad_norm: float  # global L2 norm before clipping
    applied: bool  # False if the norm was not finite and all ranks skipped the step


class Adapters(Protocol):
    """Low-rank adapters of a model (`models/lora.py`)."""

    def pieces(self) -> PieceMap:
        """Return the rectangles of the adapters' tensors (`models.lora.adapter_shapes`), which `Engine.pieces` leaves out."""
        ...

    def off(self) -> AbstractContextManager[None]:
        """Inside, passes use the base model alone. Not collective."""
        ...


class Engine(AveragedModel, Protocol):
    """One model on the ranks of its role, with its optimizer if it trains; other ranks have no engine. Roles (`trainer/roles.py`),
    bridge, checkpoints and instruments see no more of it. Methods are collective over the role's ranks unless they say otherwise.
    Those of a checkpoint are in `checkpoint/state.py`."""

    name: str
    """Name of the role, for messages."""
    arch: ModelArch
    value_head: bool
    """True if the model gives values, not log-probs."""
    shares: Shares
    """Ranks of the shares of a batch, one share per replica of the model. The same on every rank."""

    @property
    def adapters(self) -> Adapters | None:
        """Adapters of the model, None without. For the push of adapters alone, and for a reference that is the policy's base."""
        ...

    # ----------------------------------------------------------------------------------------------------------- weights

    def named_parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """Return this rank's parameters, in shapes of their own, under names that are the same in every layout. Not collective."""
        ...

    def named_gradients(self) -> Mapping[str, Tensor]:
        """Return the last training pass's gradients by parameter name, reduced unless the optimizer is sharded. `verify` compares
        them over layouts. Not collective."""
        ...

    def main_parameters(self, *, gather: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter name, whole fp32 copy that the optimizer updates in place of a bf16 parameter), for the comparison of
        replicas and for the moving average. Call it inside a mode, until whose end copies stay resident.
        gather: also assemble those of a sharded optimizer, each valid until the next one; collective over ranks that share it."""
        ...

    def merged_parameters(self) -> Weights:
        """Return the parameters by the names of `pieces`, as the bridge and exports read them; valid until the weights change.
        An adapter is added to the part of its weight that is read (`models.lora.Adapted`) and has no entry of its own."""
        ...

    def pieces(self) -> PieceMap:
        """Return position in the role's layout -> its rectangles of Hugging Face tensors, alike on every rank. The bridge plans its
        transfers from them, and the comparison of replicas finds copies. Not collective."""
        ...

    def export(self, directory: Path, source: Path, tokenizer: Tokenizer | None = None) -> None:
        """Write a Hugging Face checkpoint to `directory`; configuration and, without a `tokenizer`, its files come from `source`.
        ValueError or OSError on every rank if one fails or `directory` exists; it appears when it is complete."""

    def to(self, device: Literal["host", "device"], *, model: bool = True, optimizer: bool = True) -> None:
        """Make weights, or optimizer state, resident and free to change (as for a swap of weights); or move them to the host. Not
        collective."""
        ...

    # ------------------------------------------------------------------------------------------------------------ passes

    def train_mode(self) -> AbstractContextManager[None]:
        """Make parameters and gradients resident inside; on exit offload what the role's section offloads."""
        ...

    def eval_mode(self) -> AbstractContextManager[None]:
        """Make parameters resident inside, without recording gradients."""
        ...

    def forward_backward(
        self,
        share: PackedBatch,
        loss_fn: LossFunction,
        *,
        reads: Collection[str] = (),
        denominator: float = 1.0,
        forward_only: bool = False,
        together: Sequence[int] = (),
    ) -> PassResult:
        """Run the micro-batches of all shares; a training pass leaves the reduced gradient of sum(loss_sum) / denominator.

        share: of this rank's replica; may be empty. Tokens are read on the holders and readers of `shares`, fields on holders,
        lengths everywhere. reads: fields that loss_fn reads, if the batch has them; only these go to the device, another one is a
        KeyError. together: sizes of groups of neighbouring sequences that one loss compares, which share a micro-batch; empty for
        every sequence alone. Run one training pass between `optimizer_zero_grad` and `optimizer_step`: a second one would reduce
        gradients over ranks twice.
        """
        ...

    # --------------------------------------------------------------------------------------------------------- optimizer

    def optimizer_zero_grad(self) -> None:
        """Set the gradients to 0, before the training pass of an update."""
        ...

    def optimizer_step(self) -> StepResult:
        """Clip and apply the gradients; if they are not finite all ranks skip the step."""
        ...

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one optimizer step and return the learning rate of that step."""
        ...
