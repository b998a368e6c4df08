"""Contract between a loss and a pass: outputs of the model that a loss is given for a micro-batch, and results that it hands back.
Losses are callables of the trainer; an engine calls them where the outputs are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from megappo.data.packing import PackedBatch
from megappo.ops.linear_loss import TokenLoss

LogitsDtype = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class LogprobQuery:
    """Query of log-probs: row t of a micro-batch of T tokens is the distribution after token t."""

    target: Tensor
    """[T] int64, the id whose log-prob row t gives; `ops.vocab_shard.IGNORE_INDEX` for none."""
    temperature: float | Tensor
    """Divides the logits: of every row, or [T] of each."""
    logits_dtype: LogitsDtype = "fp32"
    """Type to which the logits are rounded before the temperature divides them."""
    kept: Tensor | None = None
    """[T, K] int32, the only ids possible in row t, then NO_ID. A row without any, and None: the whole vocabulary."""
    want_entropy: bool = True
    """Return also the entropy of the same distribution, in nats."""


class FusedLoss(Protocol):
    """A loss of log-probs that is computed, with its gradient, while the logits of a chunk of tokens exist."""

    def __call__(self, query: LogprobQuery, token_loss: TokenLoss) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (sum of token_loss over chunks of rows, a differentiable scalar; its metrics, *_max by maximum, others by sum)."""
        ...


class LanguageOutput(Protocol):
    """Distributions after each of the T tokens of a micro-batch, without whole logits or a whole output projection in memory.
    Results are over all T rows and the same on every rank of a replica, although a rank may compute only a part of them."""

    @property
    def fused_loss(self) -> FusedLoss | None:
        """Loss fused with the logits, with the same gradient as one from `logprobs`; None if there is no fused one."""
        ...

    def logprobs(self, query: LogprobQuery) -> tuple[Tensor, Tensor | None]:
        """Return (log-probs [T] fp32 of the targets, entropies [T] fp32 or None), differentiable; 0 in rows without a target."""
        ...

    def logprobs_at(self, ids: Tensor) -> Tensor:
        """Return the log-probs [T, K] fp32 of ids [T, K] int64 in each row, at temperature 1; differentiable."""
        ...

    def logits(self, rows: Tensor, logits_dtype: LogitsDtype) -> Tensor:
        """Return logits [R, V] fp32 of a few rows (int64 [R]); -inf beyond the vocabulary. Without gradient."""
        ...


@dataclass(frozen=True)
class LossOutput:
    """Results of a loss function for one micro-batch."""

    loss_sum: Tensor | None = None
    """Scalar, the un-normalised sum; None in a forward-only pass."""
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> [T] results to hand back."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> scalar, summed over micro-batches and data-parallel ranks; those of `maxima` are combined by maximum."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)


LanguageLoss = Callable[[LanguageOutput, PackedBatch], LossOutput]
ValueLoss = Callable[[Tensor, PackedBatch], LossOutput]
"""Loss of a value model from the head's raw output at every token, fp32: [T], or [T, rows] of a head with several."""
LossFunction = LanguageLoss | ValueLoss
