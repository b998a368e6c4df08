"""Scans of stage 5: one fused op makes the token rewards and runs backwards over them for advantages and returns. Time steps are
tokens or turns; V-trace weights tokens by the ratio of two policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megappo.algo.aggregation import tokens_per_sequence
from megappo.algo.chains import order_of_chains, over_turns
from megappo.algo.gae import vtrace_advantages, vtrace_weights
from megappo.algo.kl import kl_estimate
from megappo.algo.whitening import whitening_moments
from megappo.config.schema import AlgorithmConfig, VTraceConfig
from megappo.data.packing import PackedBatch, moved
from megappo.ops.advantages import Discount, Rewards, TimeSteps, token_advantages
from megappo.trainer.experience.experience import Experience

PerToken = Sequence[Sequence[float] | None]
"""Rewards of the sampled tokens of each sample, or None for a sample without."""


class Scanned(NamedTuple):
    """Result of a scan, [T] fp32 each, with the moments [3] of the advantages over the sampled tokens."""

    reward: Tensor
    advantage: Tensor
    returns: Tensor
    moments: Tensor


def rewards_of(
    batch: PackedBatch, score: Tensor, kl_coef: float, algorithm: AlgorithmConfig, per_token: PerToken | None
) -> Rewards:
    """Build the rewards of the arguments of `advantages.advantages_of`, where the batch is. score: [B] on the host."""
    of_tokens = None if per_token is None else _rewards_of_tokens(per_token, batch)
    if (distillation := algorithm.distillation) is not None and distillation.placement == "reward":
        of_teacher = teacher_term(batch, distillation.coef)
        of_tokens = of_teacher if of_tokens is None else of_tokens + of_teacher
    in_reward = algorithm.kl.placement == "reward"
    reference = batch["ref_logprob"] if in_reward else None
    score = moved(score, batch.device)
    return Rewards(batch["logprob"], reference, score, of_tokens, algorithm.kl.estimator, kl_coef if in_reward else 0.0)


def teacher_term(batch: PackedBatch, coef: float) -> Tensor:
    """Return [T] fp32, minus coef times the reverse KL to the teacher by its k1 estimate; 0 outside the mask, even if NaN there."""
    kl = kl_estimate(batch["logprob"].double(), batch["teacher_logprob"].double(), "k1")
    return torch.where(batch["response_mask"], -coef * kl, 0.0).float()


def gae_over_tokens(
    batch: PackedBatch,
    rewards: Rewards,
    value: Tensor,
    bootstrap: Tensor | None,
    discount: Discount,
    times: TimeSteps = TimeSteps(),
) -> Scanned:
    """Compute GAE of values [T]. bootstrap: [B], value after the last sampled token; None means 0. times: time steps, if not all
    sampled tokens are, and V-trace's weights of them."""
    return Scanned(*token_advantages(rewards, value, batch["response_mask"], batch.cu_seqlens, bootstrap, discount, times))


def whole_responses(batch: PackedBatch) -> PackedBatch:
    """Return the batch with the tokens of earlier steps in response_mask, for rewards and returns; unchanged without partial
    rollouts."""
    return batch.with_fields({"response_mask": batch["whole_mask"]}) if "whole_mask" in batch else batch


def gae_over_turns(batch: PackedBatch, rewards: Rewards, starts: Tensor, bootstrap: Tensor | None, discount: Discount) -> Scanned:
    """Compute GAE with turns as steps; each sampled token gets its turn's advantage and return. starts: [T] bool, `turn_starts`."""
    mask, scanned = batch["response_mask"], gae_over_tokens(batch, rewards, batch["value"], bootstrap, discount, TimeSteps(starts))
    advantage, returns = (over_turns(x, mask, starts) for x in (scanned.advantage, scanned.returns))
    return Scanned(scanned.reward, advantage, returns, whitening_moments(advantage, mask))


def gae_over_partial_rollouts(batch: PackedBatch, rewards: Rewards, bootstrap: Tensor | None, discount: Discount) -> Scanned:
    """Compute GAE of responses over several steps: advantages at this step's tokens, rewards and returns over whole responses."""
    # An advantage depends only on what follows its token, so earlier tokens do not change it.
    scanned = gae_over_tokens(whole_responses(batch), rewards, batch["value"], bootstrap, discount)
    advantage = torch.where(batch["response_mask"], scanned.advantage, 0.0)
    return Scanned(scanned.reward, advantage, scanned.returns, whitening_moments(advantage, batch["response_mask"]))


def vtrace_over_tokens(
    batch: PackedBatch, rewards: Rewards, ratio: Tensor, bounds: VTraceConfig, bootstrap: Tensor | None, discount: Discount
) -> Scanned:
    """Compute V-trace. ratio: [T] fp64, the trainer's probability over the sampler's."""
    mask, cu_seqlens = batch["response_mask"], batch.cu_seqlens
    weight, trace = vtrace_weights(ratio, mask, cu_seqlens, rho_bar=bounds.rho_bar, c_bar=bounds.c_bar)
    scanned = gae_over_tokens(batch, rewards, batch["value"], bootstrap, discount, TimeSteps(None, weight, trace))
    if bounds.c_bar >= bounds.rho_bar:  # the scan's advantages are V-trace's
        return scanned
    correction = scanned.advantage, weight, trace, mask, cu_seqlens
    advantage = vtrace_advantages(*correction, discount.gamma, discount.lam_policy)
    return Scanned(scanned.reward, advantage, scanned.returns, whitening_moments(advantage, mask))


def value_after(batch: PackedBatch, steps: Tensor, kind: bool | str) -> Tensor | None:
    """Return [B] value after a cut response (`algorithm.bootstrap_truncated`), 0 for others. steps: [T] bool, time steps."""
    goes_on = batch["unfinished"] if "unfinished" in batch else None
    if not kind and goes_on is None:
        return None
    after = batch["bootstrap"] if kind is True else _of_last(batch["value"], steps, batch.cu_seqlens)
    # A response that goes on in a later step is always bootstrapped: from its last token, as in T-PPO, unless kind is True.
    cut = batch["truncated"] if kind else torch.zeros_like(batch["truncated"])
    return torch.where(cut if goes_on is None else cut | goes_on, after, 0.0)


def _of_last(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return [B], the entry of values [T] at the last true position of mask [T] in each sequence, 0 if there is none."""
    # Last true position up to each border, from 1; 0 stands for none.
    place = torch.where(mask, torch.arange(1, len(mask) + 1, device=mask.device), 0).cummax(0).values
    starts, last = cu_seqlens[:-1].long(), torch.nn.functional.pad(place, (1, 0))[cu_seqlens[1:].long()]
    return torch.nn.functional.pad(values, (1, 0))[torch.where(last > starts, last, 0)]


def _rewards_of_tokens(per_token: PerToken, batch: PackedBatch) -> Tensor | None:
    """Return [T] fp32, 0 outside the mask; None if all are 0. On a device the host waits for the numbers of sampled tokens."""
    mask, rewards = batch["response_mask"], list[float]()
    for one, count in zip(per_token, tokens_per_sequence(mask, batch.cu_seqlens).tolist(), strict=True):
        values = [0.0] * int(count) if one is None else one
        assert len(values) == count, f"{len(values)} rewards for {count} tokens"  # `rewards.verdict` has checked it
        rewards += values
    if not any(rewards):
        return None
    return torch.zeros(mask.shape, device=mask.device).masked_scatter_(mask, moved(torch.tensor(rewards), mask.device))


@dataclass(frozen=True)
class Chains:
    """Sequences of this rank joined into trajectories. order: [B] int64 on the host, samples by chain. counts: [C] int64 there,
    sequences per chain."""

    order: Tensor
    counts: Tensor

    @classmethod
    def of(cls, experience: Experience) -> Chains | None:
        """Find the chains; None if every trajectory of all ranks is one sequence."""
        if not experience.table.has_chains:
            return None
        numbers, previous = experience.numbers, experience.table.previous[experience.numbers].long()
        places = torch.searchsorted(numbers, previous.clamp(min=0)).clamp(max=max(len(numbers) - 1, 0))
        assert bool(((previous < 0) | (numbers[places] == previous)).all()), "sequences of a trajectory lie on several ranks"
        return cls(*order_of_chains(torch.where(previous >= 0, places, -1)))

    @property
    def _last(self) -> Tensor:
        """[C] int64, positions of the last sequences in `order`."""
        return self.counts.cumsum(0) - 1

    def merged(self, batch: PackedBatch) -> PackedBatch:
        """Join each chain into one sequence, with the sequence fields of its last one."""
        ordered = batch.select(self.order)
        bounds, of_last = torch.cat((torch.zeros(1, dtype=torch.long), self.counts.cumsum(0))), moved(self._last, batch.device)
        last = {name: values[of_last] for name, values in ordered.sequence_fields.items()}
        return replace(ordered, sequence_fields=last).with_lengths(ordered.host_offsets[bounds].diff().long())

    def scores(self, score: Tensor) -> Tensor:
        """Return [C] scores from [B]: a trajectory's score is that of its last sequence."""
        return score[self.order][self._last]

    def per_token(self, per_token: PerToken | None, batch: PackedBatch) -> PerToken | None:
        """Join token rewards of samples into those of chains; sequences without any have 0."""
        if per_token is None:
            return None
        sampled = tokens_per_sequence(batch["response_mask"], batch.cu_seqlens).tolist()
        found: list[Sequence[float] | None] = []
        for chain in self.order.split(self.counts.tolist()):
            parts = [per_token[i] for i in chain.tolist()]
            given = [[0.0] * int(sampled[i]) if one is None else list(one) for i, one in zip(chain.tolist(), parts)]
            found.append(None if all(one is None for one in parts) else [x for one in given for x in one])
        return found

    def apart(self, batch: PackedBatch, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Reorder fields [T] of the merged batch to the order of `batch`."""
        places = batch.token_index(self.order)
        return {name: torch.empty_like(values).index_copy(0, places, values) for name, values in fields.items()}
