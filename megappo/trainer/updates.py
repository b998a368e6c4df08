"""Stage 6: epochs of mini-batches over one step's experience, for the critic and for the policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megappo.algo.aggregation import token_weights
from megappo.config.schema import AlgorithmConfig
from megappo.data.packing import PackedBatch
from megappo.engine.base import Engine
from megappo.trainer.roles import UpdateResult

MiniBatch = tuple[PackedBatch, float]
"""(sequences with field `weight`, denominator of the loss: count of the whole mini-batch over all ranks)"""


def mini_batches(batch: PackedBatch, algorithm: AlgorithmConfig, max_response_tokens: int, seed: int) -> Iterator[MiniBatch]:
    """Cut experience into optimizer steps of `mini_batch_size` samples: `ppo_epochs` passes, each in a new seeded order.

    max_response_tokens: the length that `loss_aggregation: fixed-length` divides by.
    """
    for epoch in range(algorithm.ppo_epochs):
        generator = torch.Generator().manual_seed((seed + epoch) % 2**63)
        order = torch.randperm(batch.num_sequences, generator=generator)
        for chosen in order.split(algorithm.mini_batch_size):
            mini = batch.select(chosen)
            weights = token_weights(algorithm.loss_aggregation, mini["response_mask"], mini.cu_seqlens, max_response_tokens)
            # Without a single sampled token every weight is 0; any denominator keeps the loss 0 instead of NaN.
            yield mini.with_fields({"weight": weights.weight}), max(float(weights.count), 1.0)


class Trainable(Protocol):
    """Policy or critic."""

    engine: Engine

    def update(self, mini: PackedBatch, denominator: float) -> UpdateResult: ...


@dataclass
class UpdateSummary:
    """Totals of one role's updates in a step. means: name -> value per token (or per mini-batch for losses and gradient norm)."""

    num_updates: int = 0
    skipped: int = 0
    stopped_early: bool = False
    lr: float | None = None
    grad_norms: list[float] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    maxima: dict[str, float] = field(default_factory=dict)
    expert_tokens: Tensor | None = None
    """[layers, experts] tokens that the routers sent to each expert, over all updates; None for a dense model."""
    balance_losses: list[float] = field(default_factory=list)
    lengths: list[Tensor] = field(default_factory=list)
    """[B] int64 of each mini-batch that was passed, tokens of its sequences."""

    def add(self, result: UpdateResult, denominator: float) -> None:
        for name, value in result.losses.sums.items():
            self.sums[name] += value
        for name, value in result.losses.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)
        if result.losses.router is not None:
            tokens = result.losses.router.tokens
            self.expert_tokens = tokens if self.expert_tokens is None else self.expert_tokens + tokens
            self.balance_losses.append(result.losses.router.balance_loss)
        for name in ("surrogate_sum", "loss_sum"):
            if name in result.losses.sums:
                self.losses[name].append(result.losses.sums[name] / denominator)
        if result.step is None:
            self.stopped_early = True
            return
        self.lr = result.lr
        self.num_updates += result.step.applied
        self.skipped += not result.step.applied
        self.grad_norms.append(result.step.grad_norm)

    def per_token(self, name: str) -> float:
        return self.sums[name] / max(self.sums["tokens_sum"], 1.0)

    def loss(self, name: str) -> float:
        return _mean(self.losses[name])

    @property
    def grad_norm(self) -> float:
        return _mean(self.grad_norms)

    @property
    def balance_loss(self) -> float:
        return _mean(self.balance_losses)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def run_updates(role: Trainable, minis: Iterable[MiniBatch]) -> UpdateSummary:
    """Run one update for each mini-batch. Ends early if the role declines one (target KL): all ranks see the same KL and stop."""
    summary = UpdateSummary()
    with role.engine.train_mode():
        for mini, denominator in minis:
            result = role.update(mini, denominator)
            summary.add(result, denominator)
            summary.lengths.append(mini.lengths)
            if result.step is None:
                break
    return summary
