"""Interface of an engine: the model of a role (policy, critic, reference) with its optimizer, for any sharding.

Roles, bridge, checkpoints, export and the instruments are written against `Engine`; only `build.py` names the engine that runs.
An engine knows nothing of PPO: losses arrive as callables. Its model replicas share a batch (`parallel/shares.py`): every rank
passes the share of its replica. `whole_batch.py` runs a pass over a batch that all ranks have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from megappo.checkpoint.state import StateBox, StatefulModel
from megappo.data.packing import PackedBatch
from megappo.models.arch import ModelArch
from megappo.models.lora import Weights
from megappo.models.pieces import PieceMap
from megappo.ops.linear_loss import TokenLoss
from megappo.parallel.placement import Placement
from megappo.parallel.shares import Shares

LogitsDtype = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class LogprobQuery:
    """Query of log-probs: row t of a micro-batch of T tokens is the distribution after token t.

    target: [T] int64, the id whose log-prob row t gives, `ops.vocab_shard.IGNORE_INDEX` for none. temperature: divides the logits,
    of every row or [T] of each. logits_dtype: the logits are rounded to it before that. kept: [T, K] int32, the only ids possible
    in row t, then NO_ID; a row without any, and None, is the whole vocabulary. want_entropy: also the entropy of the same
    distribution, in nats.
    """

    target: Tensor
    temperature: float | Tensor
    logits_dtype: LogitsDtype = "fp32"
    kept: Tensor | None = None
    want_entropy: bool = True


class FusedLoss(Protocol):
    """A loss of log-probs that is computed, with its gradient, while the logits of a chunk of tokens exist."""

    def __call__(self, query: LogprobQuery, token_loss: TokenLoss) -> tuple[Tensor, dict[str, Tensor]]:
        """(sum of token_loss over chunks of rows, a differentiable scalar; its metrics, *_max by maximum, others by sum)."""
        ...


class LanguageOutput(Protocol):
    """Distributions after each of the T tokens of a micro-batch, without logits or a whole output projection in memory.

    Results are over all T rows and the same on every rank of a replica, although a rank may compute only a part of them.
    """

    @property
    def fused_loss(self) -> FusedLoss | None:
        """Loss fused with the logits; None if the loss has to be computed from `logprobs`. Both ways give the same gradient."""
        ...

    def logprobs(self, query: LogprobQuery) -> tuple[Tensor, Tensor | None]:
        """(log-probs [T] fp32 of the targets, entropies [T] fp32 or None), differentiable; 0 in rows without a target."""
        ...

    def logits(self, rows: Tensor, logits_dtype: LogitsDtype) -> Tensor:
        """Logits [R, V] fp32 of a few rows (int64 [R]); columns beyond the vocabulary are -inf. Without gradient."""
        ...


@dataclass(frozen=True)
class LossOutput:
    """Results of a loss function for one micro-batch.

    loss_sum: scalar, the un-normalised sum (None when the pass is forward only). tokens: name -> [T] results to hand back.
    sums / maxima: name -> scalar, combined over micro-batches and data-parallel ranks by sum / max.
    """

    loss_sum: Tensor | None = None
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)


LanguageLoss = Callable[[LanguageOutput, PackedBatch], LossOutput]
ValueLoss = Callable[[Tensor, PackedBatch], LossOutput]
"""Loss of a value model: takes the head's raw output at every token, fp32: [T], or [T, rows] of a head with several."""
LossFunction = LanguageLoss | ValueLoss


@dataclass(frozen=True)
class RouterSummary:
    """Load of the routers of a model with experts in one training pass.

    tokens: [layers, experts] fp64, tokens sent to each expert (0 in dense layers). balance_loss: mean over sequences of their
    balancing losses, summed over layers, before the coefficient; 0 if the coefficient is 0.
    """

    tokens: Tensor
    balance_loss: float


@dataclass(frozen=True)
class PassResult:
    """Outcome of one pass. tokens: name -> [T] fp32 in the order of this replica's share, zeros on ranks that do not report them.

    The rest is of all replicas, identical on every rank. router: of a training pass of a model with experts.
    """

    tokens: dict[str, Tensor]
    sums: dict[str, float]
    maxima: dict[str, float]
    num_micro_batches: int
    router: RouterSummary | None = None


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step. grad_norm: global L2 norm before clipping. applied: False if it was not finite and the step was
    skipped on all ranks."""

    grad_norm: float
    applied: bool


class Engine(StatefulModel, Protocol):
    """One model on the ranks of its role, with its optimizer if it trains. A rank that the role does not live on has no engine.

    Methods are collective over the role's ranks unless they say otherwise: nobody else takes part or waits.
    """

    @property
    def name(self) -> str:
        """The role, for messages."""
        ...

    @property
    def placement(self) -> Placement:
        """Ranks of the role."""
        ...

    @property
    def arch(self) -> ModelArch: ...

    @property
    def value_head(self) -> bool:
        """True if the model gives values, not log-probs."""
        ...

    @property
    def shares(self) -> Shares:
        """Ranks of the shares of a batch, one for each replica of the model. The same on every rank."""
        ...

    # ----------------------------------------------------------------------------------------------------------- weights

    def named_parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """This rank's parameters, under names that are the same in every layout. Not collective."""
        ...

    def named_gradients(self) -> Mapping[str, Tensor]:
        """Gradients of the last training pass, reduced unless the optimizer is sharded; names as above. Not collective."""
        ...

    def main_parameters(self) -> Mapping[str, Tensor]:
        """Whole fp32 copies that the optimizer updates in place of bf16 parameters; names as above. Empty without such copies, and
        if the optimizer is sharded. Resident until the mode is left. Not collective."""
        ...

    def fp32_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name as above, values on this rank in fp32) of every parameter: those that the optimizer updates, not their rounding.

        Each is good until the next is asked for. Inside a mode; collective over ranks that share a sharded optimizer.
        """
        ...

    def merged_parameters(self) -> Weights:
        """Parameters by the names of `pieces`, as the bridge and an export read them: a weight with an adapter adds it to the part
        that is read (`models.lora.Adapted`), and adapters have no entry of their own. Good until the weights change."""
        ...

    def without_adapters(self) -> AbstractContextManager[None]:
        """Inside, passes give the output of the base model. An AssertionError on an engine without adapters. Not collective."""
        ...

    def pieces(self) -> PieceMap:
        """Position in the role's layout -> its rectangles of Hugging Face tensors, by the names above. Not collective; the same on
        every rank."""
        ...

    def adapter_pieces(self) -> PieceMap:
        """The same of adapters' tensors (`models.lora.adapter_shapes`), in the parameters that hold them; none without adapters."""
        ...

    def boxes_of(self, values: Mapping[str, Tensor], *, to_save: bool) -> Sequence[StateBox]:
        """Boxes of Hugging Face tensors that values in the place of the named parameters make up: those that this rank writes to a
        checkpoint, or all. Not collective."""
        ...

    def export(self, directory: Path, source: Path) -> None:
        """Write a Hugging Face checkpoint to `directory`; configuration and tokenizer files come from `source`.

        ValueError or OSError on every rank if one fails or `directory` exists; it appears when it is complete.
        """

    def to(self, device: Literal["host", "device"], *, model: bool = True, optimizer: bool = True) -> None:
        """Make weights, or optimizer state, resident and free to change; or move them to the host. Not collective."""
        ...

    # ------------------------------------------------------------------------------------------------------------ passes

    def train_mode(self) -> AbstractContextManager[None]:
        """Make parameters and gradients resident inside; on exit offload the parts that the role's section offloads."""
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
    ) -> PassResult:
        """Run the micro-batches of all shares; a training pass leaves the reduced gradient of sum(loss_sum) / denominator.

        share: of this rank's replica, which may be empty. Tokens are read where `shares` has holders and readers, fields where it
        has holders; lengths everywhere. One training pass between `optimizer_zero_grad` and `optimizer_step`: a second one would
        reduce gradients over ranks twice. reads: fields of the batch that loss_fn reads, if the batch has them. No others go to the
        device; reading another field of a micro-batch is a KeyError.
        """
        ...

    # --------------------------------------------------------------------------------------------------------- optimizer

    def optimizer_zero_grad(self) -> None: ...

    def optimizer_step(self) -> StepResult:
        """Clip and apply the gradients; if they are not finite the step is skipped on all ranks."""
        ...

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one optimizer step; returns the learning rate that this step uses."""
        ...


class WithoutAdapters(ABC):
    """The methods of `Engine` about adapters, for an engine, or a model in it, that has none."""

    name: str

    @abstractmethod
    def named_parameters(self) -> Mapping[str, torch.nn.Parameter]: ...

    @property
    @abstractmethod
    def placement(self) -> Placement: ...

    def merged_parameters(self) -> Weights:
        return self.named_parameters()

    def adapter_pieces(self) -> PieceMap:
        return PieceMap.of(dict.fromkeys(range(len(self.placement)), ()))

    def without_adapters(self) -> AbstractContextManager[None]:
        raise AssertionError(f"{self.name} has no adapters")
