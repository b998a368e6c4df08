"""Stage 5: KL-shaped rewards and advantages. GAE with separate lambdas for policy and critic, or an estimator without a critic;
whitening over the whole global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megappo.algo.aggregation import tokens_per_sequence
from megappo.algo.gae import length_adaptive_lambda, token_rewards
from megappo.algo.groups import equal_groups, grpo_advantages, rloo_advantages
from megappo.algo.whitening import whitening_moments
from megappo.config.schema import AlgorithmConfig
from megappo.data.packing import PackedBatch
from megappo.experience.experience import Experience
from megappo.ops.advantages import gae, token_advantages
from megappo.ops.whiten import whiten_apply
from megappo.parallel.totals import total
from megappo.telemetry.metrics import Metric
from megappo.trainer.reweighting import on_sampled, reweight

# Ops of stage 5, which run where the experience is: on the host.
HOST_OPS = ("token_advantages", "whiten_apply")

PerToken = Sequence[Sequence[float] | None]
"""Rewards of the sampled tokens of each sample, or None for a sample without."""


class Shaped(NamedTuple):
    """experience: with the fields of stage 5. metrics: figures of the estimator, the same on every rank."""

    experience: Experience
    metrics: dict[str, float]


def shape_experience(
    experience: Experience,
    score: Tensor,
    kl_coef: float,
    algorithm: AlgorithmConfig,
    per_token: PerToken | None = None,
    greedy: Tensor | None = None,
) -> Shaped:
    """Stage 5 with the estimator of `algorithm`: fields as `shape_advantages`, without a critic no returns. Collective over the
    world.

    score, kl_coef, per_token: as there, of this rank's samples. greedy: [B] score of the greedy response to the prompt of each
    sample, for the estimator remax.
    """
    if algorithm.has_critic:
        batch = shape_advantages(experience.batch, score, kl_coef, algorithm, per_token)
        shaped = Shaped(experience.with_batch(batch), {})
    else:
        shaped = _without_critic(experience, score, kl_coef, algorithm, per_token, greedy)
    reweighted, metrics = reweight(shaped.experience, algorithm)
    return Shaped(reweighted, {**shaped.metrics, **metrics})


def shape_advantages(
    batch: PackedBatch,
    score: Tensor,
    kl_coef: float,
    algorithm: AlgorithmConfig,
    per_token: PerToken | None = None,
) -> PackedBatch:
    """Add reward, advantage (whitened if asked), raw_advantage and returns, all [T] fp32 and 0 outside the response mask.

    batch: this rank's samples; whitening takes the moments of all ranks'. Collective over the world. It has logprob, value,
    response_mask, bootstrap, truncated (and ref_logprob with the KL in the reward); score: [B]. kl_coef: the controller's current
    coefficient, used only with the KL in the reward. per_token: [B] rewards of the sampled tokens, one for each, or None for a
    sample without; they add to KL and score.
    """
    mask = batch["response_mask"]
    lam_policy: float | Tensor = algorithm.lam
    if algorithm.lam_length_alpha is not None:
        lam_policy = length_adaptive_lambda(tokens_per_sequence(mask, batch.cu_seqlens), algorithm.lam_length_alpha)
    bootstrap = torch.where(batch["truncated"], batch["bootstrap"], 0.0) if algorithm.bootstrap_truncated else None
    lam_value = algorithm.lam if algorithm.lam_value is None else algorithm.lam_value
    lams = {"lam_policy": lam_policy, "lam_value": lam_value}
    scanned = _scan(batch, score, kl_coef, algorithm, per_token, batch["value"], bootstrap, gamma=algorithm.gamma, **lams)
    whitened = whiten_apply(scanned.advantage, mask, total(scanned.moments)) if algorithm.whitens else scanned.advantage
    return batch.with_fields(
        {"reward": scanned.reward, "advantage": whitened, "raw_advantage": scanned.advantage, "returns": scanned.returns}
    )


def _without_critic(
    experience: Experience,
    score: Tensor,
    kl_coef: float,
    algorithm: AlgorithmConfig,
    per_token: PerToken | None,
    greedy: Tensor | None,
) -> Shaped:
    """Advantages from returns alone. The rewards of a response are those of its tokens, KL included if it is placed there."""
    batch, metrics = experience.batch, {}
    mask, group = batch["response_mask"], experience.table.group
    # GAE of a value of 0 with lambda 1: the discounted sum of the rewards from a token on.
    gamma = algorithm.gamma if algorithm.estimator == "reinforce_plus_plus" else 1.0
    value = torch.zeros_like(batch["logprob"])
    scanned = _scan(batch, score, kl_coef, algorithm, per_token, value, None, gamma=gamma, lam_policy=1.0, lam_value=1.0)
    advantage = scanned.advantage
    if algorithm.compares_groups:
        assert int(group.min()) >= 0, "a sample without a group has nothing to be compared with"
        reward = experience.column(_of_responses(scanned.advantage, score, batch))
        compared = (
            rloo_advantages(reward, group)
            if algorithm.estimator == "rloo"
            else grpo_advantages(reward, group, divide_by_std=algorithm.divide_by_group_std)
        )
        advantage = on_sampled(compared[experience.numbers], batch)
        metrics[Metric.EQUAL_GROUPS.value] = equal_groups(experience.column(score), group)
    elif algorithm.estimator == "remax":
        assert greedy is not None, "remax compares with greedy responses"
        advantage = torch.where(mask, advantage - on_sampled(greedy, batch), 0.0)
        metrics[Metric.GREEDY_SCORE.value] = float(experience.column(greedy).mean())
    whitened = whiten_apply(advantage, mask, total(whitening_moments(advantage, mask))) if algorithm.whitens else advantage
    fields = {"reward": scanned.reward, "advantage": whitened, "raw_advantage": advantage}
    return Shaped(experience.with_batch(batch.with_fields(fields)), metrics)


class _Scanned(NamedTuple):
    """[T] fp32 each, and the moments [3] of the advantages."""

    reward: Tensor
    advantage: Tensor
    returns: Tensor
    moments: Tensor


def _scan(
    batch: PackedBatch,
    score: Tensor,
    kl_coef: float,
    algorithm: AlgorithmConfig,
    per_token: PerToken | None,
    value: Tensor,
    bootstrap: Tensor | None,
    *,
    gamma: float,
    lam_policy: float | Tensor,
    lam_value: float,
) -> _Scanned:
    """Rewards, and GAE over them. Arguments as `shape_advantages` and `ops.advantages.token_advantages`."""
    mask, kl_in_reward = batch["response_mask"], algorithm.kl.placement == "reward"
    ref_logprob = batch["ref_logprob"] if kl_in_reward else None
    scan = {"gamma": gamma, "lam_policy": lam_policy, "lam_value": lam_value}
    kl = {"kl_estimator": algorithm.kl.estimator, "kl_coef": kl_coef if kl_in_reward else 0.0}
    inner = None
    if per_token is not None:
        at_end, inner = _at_end_and_before(per_token, batch)
        score = (score.double() + at_end).float()
    if inner is None:
        return _Scanned(
            *token_advantages(batch["logprob"], ref_logprob, score, value, mask, batch.cu_seqlens, bootstrap, **scan, **kl)
        )
    # The kernel of the line above knows one score per sequence.
    reward = (token_rewards(batch["logprob"], ref_logprob, score, mask, batch.cu_seqlens, **kl) + inner).float()
    return _Scanned(reward, *gae(reward, value, mask, batch.cu_seqlens, bootstrap, **scan))


def _of_responses(returns: Tensor, score: Tensor, batch: PackedBatch) -> Tensor:
    """[B] rewards of whole responses: the return [T] at the first sampled token, or the score of a response without any."""
    counts = tokens_per_sequence(batch["response_mask"], batch.cu_seqlens)
    # Place of each sequence's first among all sampled tokens; one number more stands for those without any.
    sampled = torch.cat((returns[batch["response_mask"]], returns.new_zeros(1)))
    return torch.where(counts > 0, sampled[counts.cumsum(0) - counts], score.float())


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
