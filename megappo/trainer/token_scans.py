"""Stage 5, its scans: the rewards of tokens, and what runs backwards over them to make advantages and returns.

Over tokens without rewards of their own one fused op does both. Everything else makes the rewards first: rewards of inner tokens,
turns as time steps, V-trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megappo.algo.aggregation import tokens_per_sequence
from megappo.algo.gae import token_rewards
from megappo.algo.turns import over_turns, turn_sums
from megappo.algo.vtrace import vtrace
from megappo.algo.whitening import whitening_moments
from megappo.config.schema import AlgorithmConfig, VTraceConfig
from megappo.data.packing import PackedBatch
from megappo.ops.advantages import gae, token_advantages

PerToken = Sequence[Sequence[float] | None]
"""Rewards of the sampled tokens of each sample, or None for a sample without."""


class Scanned(NamedTuple):
    """[T] fp32 each, and the moments [3] of the advantages over the sampled tokens."""

    reward: Tensor
    advantage: Tensor
    returns: Tensor
    moments: Tensor


class Discount(NamedTuple):
    """gamma and lambdas of a scan; a lambda is one number or [B]."""

    gamma: float
    lam_policy: float | Tensor
    lam_value: float | Tensor


@dataclass(frozen=True)
class Rewards:
    """Rewards of a batch. score: [B], of the last sampled tokens. inner: [T] fp64 of those before them; None if these are all 0.
    ref_logprob: [T], None without a KL in the reward. kl: its estimator and coefficient."""

    score: Tensor
    inner: Tensor | None
    ref_logprob: Tensor | None
    kl: Mapping[str, Any]

    @classmethod
    def of(
        cls, batch: PackedBatch, score: Tensor, kl_coef: float, algorithm: AlgorithmConfig, per_token: PerToken | None
    ) -> Rewards:
        """Arguments as `shaping.shape_advantages`."""
        inner, kl_in_reward = None, algorithm.kl.placement == "reward"
        if per_token is not None:
            at_end, inner = _at_end_and_before(per_token, batch)
            score = (score.double() + at_end).float()
        kl = {"kl_estimator": algorithm.kl.estimator, "kl_coef": kl_coef if kl_in_reward else 0.0}
        return cls(score, inner, batch["ref_logprob"] if kl_in_reward else None, kl)

    def of_tokens(self, batch: PackedBatch) -> Tensor:
        """[T] fp64."""
        reward = token_rewards(batch["logprob"], self.ref_logprob, self.score, batch["response_mask"], batch.cu_seqlens, **self.kl)
        return reward if self.inner is None else reward + self.inner


def gae_over_tokens(batch: PackedBatch, rewards: Rewards, value: Tensor, bootstrap: Tensor | None, discount: Discount) -> Scanned:
    """GAE of values [T]. bootstrap: [B] value after the last sampled token, None means 0."""
    mask, cu_seqlens, scan = batch["response_mask"], batch.cu_seqlens, discount._asdict()
    if rewards.inner is None:
        given = batch["logprob"], rewards.ref_logprob, rewards.score, value, mask, cu_seqlens, bootstrap
        return Scanned(*token_advantages(*given, **scan, **rewards.kl))
    reward = rewards.of_tokens(batch).float()  # the op of the lines above knows one score per sequence
    return Scanned(reward, *gae(reward, value, mask, cu_seqlens, bootstrap, **scan))


def gae_over_turns(batch: PackedBatch, rewards: Rewards, starts: Tensor, bootstrap: Tensor | None, discount: Discount) -> Scanned:
    """GAE whose steps are turns, at every sampled token the advantage and return of its turn. starts: [T] bool, of
    `algo.turns.turn_starts`."""
    mask, reward = batch["response_mask"], rewards.of_tokens(batch)
    of_turns = turn_sums(reward, mask, starts).float()
    advantage, returns, _ = gae(of_turns, batch["value"], starts, batch.cu_seqlens, bootstrap, **discount._asdict())
    advantage, returns = (over_turns(x, mask, starts) for x in (advantage, returns))
    return Scanned(reward.float(), advantage, returns, whitening_moments(advantage, mask))


def gae_over_windows(batch: PackedBatch, rewards: Rewards, bootstrap: Tensor | None, discount: Discount) -> Scanned:
    """GAE of responses that are sampled over several steps: advantages at the tokens of this step, rewards and returns at those of
    the whole response. An advantage reads what follows its token, so that it is that of a scan over the step's tokens alone."""
    whole = batch.with_fields({"response_mask": batch["whole_mask"]})
    reward = rewards.of_tokens(whole).float()
    given = reward, batch["value"], batch["whole_mask"], batch.cu_seqlens, bootstrap
    advantage, returns, _ = gae(*given, **discount._asdict())
    advantage = torch.where(batch["response_mask"], advantage, 0.0)
    return Scanned(reward, advantage, returns, whitening_moments(advantage, batch["response_mask"]))


def vtrace_over_tokens(
    batch: PackedBatch, rewards: Rewards, ratio: Tensor, bounds: VTraceConfig, bootstrap: Tensor | None, discount: Discount
) -> Scanned:
    """V-trace. ratio: [T] fp64 of the trainer's probability to the sampler's."""
    mask, reward = batch["response_mask"], rewards.of_tokens(batch)
    clips = {"rho_bar": bounds.rho_bar, "c_bar": bounds.c_bar}
    given = reward, batch["value"], ratio, mask, batch.cu_seqlens, bootstrap
    advantage, returns = vtrace(*given, **clips, **discount._asdict())
    return Scanned(reward.float(), advantage, returns, whitening_moments(advantage, mask))


def value_after(batch: PackedBatch, steps: Tensor, kind: bool | str) -> Tensor | None:
    """[B] value that a cut response goes on with, 0 for the others: `algorithm.bootstrap_truncated`. steps: [T] bool, tokens that
    are time steps.

    A response that goes on in a later step is bootstrapped in any case, as T-PPO has it unless kind is true.
    """
    goes_on = batch["unfinished"] if "unfinished" in batch else None
    if not kind and goes_on is None:
        return None
    after = batch["bootstrap"] if kind is True else _of_last(batch["value"], steps, batch.cu_seqlens)
    cut = batch["truncated"] if kind else torch.zeros_like(batch["truncated"])
    return torch.where(cut if goes_on is None else cut | goes_on, after, 0.0)


def _of_last(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[B] entry of values [T] at the last true one of mask [T] in each sequence, 0 of a sequence without any."""
    counts = tokens_per_sequence(mask, cu_seqlens)
    # Place of each sequence's last among all true ones, from 1: place 0 stands for none.
    kept = torch.cat((values.new_zeros(1), values[mask]))
    return kept[torch.where(counts > 0, counts.cumsum(0), 0)]


def _at_end_and_before(per_token: PerToken, batch: PackedBatch) -> tuple[Tensor, Tensor | None]:
    """Rewards of the last sampled tokens, [B] fp64, and of those before them, [T] fp64; None if these are all 0."""
    counts = tokens_per_sequence(batch["response_mask"], batch.cu_seqlens).tolist()
    at_end = torch.zeros(batch.num_sequences, dtype=torch.float64)
    before: list[float] = []
    for i, (rewards, count) in enumerate(zip(per_token, counts, strict=True)):
        values = [0.0] * int(count) if rewards is None else list(rewards)
        assert len(values) == count, f"{len(values)} rewards for {count} tokens"  # `rewards.verdict` has checked it
        if values:
            at_end[i], values[-1] = values[-1], 0.0
        before += values
    if not any(before):
        return at_end, None
    inner = torch.zeros(batch.num_tokens, dtype=torch.float64)
    inner[batch["response_mask"]] = torch.tensor(before, dtype=torch.float64)
    return at_end, inner
