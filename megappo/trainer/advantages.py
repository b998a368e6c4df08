"""Stage 5: KL-shaped rewards and advantages by GAE, V-trace or an estimator without critic. The scans are in `token_scans.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megappo.algo.aggregation import tokens_per_sequence
from megappo.algo.chains import turn_starts
from megappo.algo.gae import length_adaptive_lambda
from megappo.algo.groups import COMPARISONS, equal_groups
from megappo.algo.importance_sampling import behaviour_ratio, importance_weights
from megappo.algo.whitening import whiten_apply, whitening_moments
from megappo.config.schema import AlgorithmConfig
from megappo.data.packing import PackedBatch, moved
from megappo.ops.advantages import Discount
from megappo.parallel.totals import total
from megappo.telemetry.metrics import Metric
from megappo.trainer.critics import critics_in, of_critic, of_critics, with_disagreement
from megappo.trainer.experience.experience import Experience
from megappo.trainer.reweighting import importance_figures, on_sampled, reweight
from megappo.trainer.token_scans import (
    Chains,
    PerToken,
    Scanned,
    gae_over_partial_rollouts,
    gae_over_tokens,
    gae_over_turns,
    rewards_of,
    teacher_term,
    value_after,
    vtrace_over_tokens,
    whole_responses,
)

GREEDY = "greedy"
"""Batch field of the estimator remax: [B] fp64, score of the greedy response to each sample's prompt."""


class Shaped(NamedTuple):
    """Experience with the fields of stage 5, and the estimator's metrics, which are the same on every rank."""

    experience: Experience
    metrics: dict[str, float]


def add_advantages(
    experience: Experience, score: Tensor, kl_coef: float, algorithm: AlgorithmConfig, per_token: PerToken | None = None
) -> Shaped:
    """Add the fields of `advantages_of` with the estimator of `algorithm`; an estimator without a critic adds no returns.
    score: [B] on the host, in the order of the batch. remax reads the field GREEDY. ValueError for trajectories of several
    sequences without a critic. Collective over the world."""
    if algorithm.has_critic:
        batch, figures = _in_chains(experience, score, kl_coef, algorithm, per_token)
        batch, of_disagreement = with_disagreement(batch)
        figures = {**figures, **of_disagreement}
        shaped = Shaped(experience.with_batch(batch), figures)
    elif experience.table.has_chains:
        raise ValueError(
            f"algorithm.estimator {algorithm.estimator.type}: trajectories of several sequences need a critic, gae or vtrace"
        )
    else:
        shaped = _without_critic(experience, score, kl_coef, algorithm, per_token)
    if (distillation := algorithm.distillation) is not None and distillation.placement == "advantage":
        batch = shaped.experience.batch
        of_teacher = teacher_term(batch, distillation.coef)
        fields = {name: batch[name] + of_teacher for name in ("advantage", "raw_advantage")}
        shaped = shaped._replace(experience=shaped.experience.with_fields(fields))
    reweighted, metrics = reweight(shaped.experience, algorithm)
    return Shaped(reweighted, {**shaped.metrics, **metrics})


def advantages_of(
    batch: PackedBatch, score: Tensor, kl_coef: float, algorithm: AlgorithmConfig, per_token: PerToken | None = None
) -> PackedBatch:
    """Add reward, advantage (whitened if configured), raw_advantage and each critic's returns, [T] fp32, 0 outside response_mask.

    With several critics, the advantages come from their joint value and each critic's returns from its own value. `level: turn`
    also adds value_mask, [T] bool: the tokens that the critics learn from. With partial rollouts (fields whole_mask and unfinished
    of `pack_experience`), value_mask, reward and returns cover the whole responses that end in this step, and a length-adaptive
    lambda uses the length so far. Collective over the world: whitening uses the moments of all ranks.

    batch: this rank's samples with logprob, response_mask, truncated, and value and bootstrap of every critic; also ref_logprob and
    teacher_logprob if their KL is in the reward, rollout_logprob for V-trace. score: [B] on the host. kl_coef: the controller's
    current coefficient.
    per_token: [B] rewards of each sampled token, or None for a sample without; they are added to KL and score.
    """
    return _with_critic(batch, score, kl_coef, algorithm, per_token)[0]


def _in_chains(
    experience: Experience, score: Tensor, kl_coef: float, algorithm: AlgorithmConfig, per_token: PerToken | None
) -> tuple[PackedBatch, dict[str, float]]:
    """Run `_with_critic` with the sequences of a trajectory merged into one, scored by its last sequence."""
    batch, chains = experience.batch, Chains.of(experience)
    if chains is None:
        return _with_critic(batch, score, kl_coef, algorithm, per_token)
    whole = chains.merged(batch)
    found, figures = _with_critic(whole, chains.scores(score), kl_coef, algorithm, chains.per_token(per_token, batch))
    added = {name: x for name, x in found.token_fields.items() if x is not whole.token_fields.get(name)}
    return batch.with_fields(chains.apart(batch, added)), figures


def _with_critic(
    batch: PackedBatch, score: Tensor, kl_coef: float, algorithm: AlgorithmConfig, per_token: PerToken | None
) -> tuple[PackedBatch, dict[str, float]]:
    mask, by_turns, metrics = batch["response_mask"], algorithm.by_turns, {}
    responses = whole_responses(batch)
    whole, is_partial = responses["response_mask"], responses is not batch
    steps = turn_starts(mask, batch.cu_seqlens) if by_turns else whole
    rewards, discount = rewards_of(responses, score, kl_coef, algorithm, per_token), _discount(batch, steps, algorithm)
    ratio, estimator = None, algorithm.estimator
    if estimator.type == "vtrace":
        ratio = behaviour_ratio(batch["logprob"], batch["rollout_logprob"], mask, batch.cu_seqlens, "token")
        metrics = importance_figures(ratio, importance_weights(ratio, mask, "tis", None, estimator.rho_bar), mask)

    def scan(view: PackedBatch) -> Scanned:
        bootstrap = value_after(view, steps, algorithm.bootstrap_truncated)
        if ratio is not None and estimator.type == "vtrace":
            return vtrace_over_tokens(view, rewards, ratio, estimator, bootstrap, discount)
        if by_turns:
            return gae_over_turns(view, rewards, steps, bootstrap, discount)
        if is_partial:
            return gae_over_partial_rollouts(view, rewards, bootstrap, discount)
        return gae_over_tokens(view, rewards, view["value"], bootstrap, discount)

    critics, scanned = critics_in(batch), scan(of_critics(batch, algorithm.value_of_critics))
    returns = {"returns": scanned.returns}
    if len(critics) > 1:
        returns = {one.returns: scan(of_critic(batch, one)).returns for one in critics.values()}
    whitened = whiten_apply(scanned.advantage, mask, total(scanned.moments)) if algorithm.whitens else scanned.advantage
    fields = {"reward": scanned.reward, "advantage": whitened, "raw_advantage": scanned.advantage, **returns}
    if by_turns:
        fields["value_mask"] = steps
    elif is_partial:  # returns of a response that goes on are not known yet
        fields["value_mask"] = whole & ~batch.of_tokens(batch["unfinished"])
    return batch.with_fields(fields), metrics


def _discount(batch: PackedBatch, steps: Tensor, algorithm: AlgorithmConfig) -> Discount:
    """Return gamma and the lambdas. steps: [T] bool, tokens that are time steps."""
    lam_policy: float | Tensor = algorithm.lam
    if algorithm.lam_length_alpha is not None:
        lam_policy = length_adaptive_lambda(tokens_per_sequence(steps, batch.cu_seqlens), algorithm.lam_length_alpha)
    return Discount(algorithm.gamma, lam_policy, algorithm.lam if algorithm.lam_value is None else algorithm.lam_value)


def _without_critic(
    experience: Experience, score: Tensor, kl_coef: float, algorithm: AlgorithmConfig, per_token: PerToken | None
) -> Shaped:
    batch, metrics = experience.batch, {}
    mask, group, estimator = batch["response_mask"], experience.table.group, algorithm.estimator
    # GAE of a value of 0 with lambda 1: the discounted sum of the rewards from a token on.
    gamma = algorithm.gamma if estimator.discounts else 1.0
    rewards, value = rewards_of(batch, score, kl_coef, algorithm, per_token), torch.zeros_like(batch["logprob"])
    scanned = gae_over_tokens(batch, rewards, value, None, Discount(gamma, lam_policy=1.0, lam_value=1.0))
    advantage = scanned.advantage
    if algorithm.compares_groups:
        assert int(group.min()) >= 0, "a sample without a group has nothing to be compared with"
        reward = experience.column(_of_responses(scanned.advantage, score, batch))
        compared = COMPARISONS[estimator.type](reward, group, estimator)
        advantage = on_sampled(compared[experience.numbers], batch)
        metrics[Metric.EQUAL_GROUPS.value] = equal_groups(experience.column(score), group)
    elif estimator.type == "remax":
        greedy = batch[GREEDY]
        advantage = torch.where(mask, advantage - on_sampled(greedy, batch), 0.0)
        metrics[Metric.GREEDY_SCORE.value] = float(experience.column(greedy).mean())
    whitened = whiten_apply(advantage, mask, total(whitening_moments(advantage, mask))) if algorithm.whitens else advantage
    fields = {"reward": scanned.reward, "advantage": whitened, "raw_advantage": advantage}
    return Shaped(experience.with_batch(batch.with_fields(fields)), metrics)


def _of_responses(returns: Tensor, score: Tensor, batch: PackedBatch) -> Tensor:
    """Return [B] rewards of whole responses: the return [T] at the first sampled token, or the score if no token was sampled."""
    counts = tokens_per_sequence(batch["response_mask"], batch.cu_seqlens)
    # Index of each sequence's first sampled token; the extra zero at the end serves sequences without one.
    sampled = torch.cat((returns[batch["response_mask"]], returns.new_zeros(1)))
    return torch.where(counts > 0, sampled[counts.cumsum(0) - counts], moved(score.float(), batch.device))
