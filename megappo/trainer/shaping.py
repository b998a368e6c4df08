"""Stage 5: KL-shaped rewards, GAE with separate lambdas for policy and critic, whitening over the whole global batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megappo.algo.aggregation import tokens_per_sequence
from megappo.algo.gae import length_adaptive_lambda, token_rewards
from megappo.config.schema import AlgorithmConfig
from megappo.data.packing import PackedBatch
from megappo.ops.advantages import gae, token_advantages
from megappo.ops.whiten import whiten_apply
from megappo.parallel.totals import total

# Ops of stage 5, which run where the experience is: on the host.
HOST_OPS = ("token_advantages", "whiten_apply")


def shape_advantages(
    batch: PackedBatch,
    score: Tensor,
    kl_coef: float,
    algorithm: AlgorithmConfig,
    per_token: Sequence[Sequence[float] | None] | None = None,
) -> PackedBatch:
    """Add reward, advantage (whitened if asked), raw_advantage and returns, all [T] fp32 and 0 outside the response mask.

    batch: this rank's samples; whitening takes the moments of all ranks'. Collective over the world. It has logprob, value,
    response_mask, bootstrap, truncated (and ref_logprob with the KL in the reward); score: [B]. kl_coef: the controller's current
    coefficient, used only with the KL in the reward. per_token: [B] rewards of the sampled tokens, one for each, or None for a
    sample without; they add to KL and score.
    """
    mask = batch["response_mask"]
    kl_in_reward = algorithm.kl.placement == "reward"
    lam_policy: float | Tensor = algorithm.lam
    if algorithm.lam_length_alpha is not None:
        lam_policy = length_adaptive_lambda(tokens_per_sequence(mask, batch.cu_seqlens), algorithm.lam_length_alpha)
    ref_logprob = batch["ref_logprob"] if kl_in_reward else None
    bootstrap = torch.where(batch["truncated"], batch["bootstrap"], 0.0) if algorithm.bootstrap_truncated else None
    scan = {
        "gamma": algorithm.gamma,
        "lam_policy": lam_policy,
        "lam_value": algorithm.lam if algorithm.lam_value is None else algorithm.lam_value,
    }
    kl = {"kl_estimator": algorithm.kl.estimator, "kl_coef": kl_coef if kl_in_reward else 0.0}
    inner = None
    if per_token is not None:
        at_end, inner = _at_end_and_before(per_token, batch)
        score = (score.double() + at_end).float()
    if inner is None:
        reward, advantage, returns, moments = token_advantages(
            batch["logprob"], ref_logprob, score, batch["value"], mask, batch.cu_seqlens, bootstrap, **scan, **kl
        )
    else:  # the kernel of the line above knows one score per sequence
        reward = (token_rewards(batch["logprob"], ref_logprob, score, mask, batch.cu_seqlens, **kl) + inner).float()
        advantage, returns, moments = gae(reward, batch["value"], mask, batch.cu_seqlens, bootstrap, **scan)
    whitened = whiten_apply(advantage, mask, total(moments)) if algorithm.whiten_advantages else advantage
    return batch.with_fields({"reward": reward, "advantage": whitened, "raw_advantage": advantage, "returns": returns})


def _at_end_and_before(per_token: Sequence[Sequence[float] | None], batch: PackedBatch) -> tuple[Tensor, Tensor | None]:
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
