"""Stage 5: KL-shaped rewards, GAE with separate lambdas for policy and critic, whitening over the whole global batch."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algo.aggregation import tokens_per_sequence
from megappo.algo.gae import length_adaptive_lambda
from megappo.config.schema import AlgorithmConfig
from megappo.data.packing import PackedBatch
from megappo.ops.advantages import token_advantages
from megappo.ops.whiten import whiten_apply

# Ops of stage 5, which run where the experience is: on the host.
HOST_OPS = ("token_advantages", "whiten_apply")


def shape_advantages(batch: PackedBatch, score: Tensor, kl_coef: float, algorithm: AlgorithmConfig) -> PackedBatch:
    """Add reward, advantage (whitened if asked), raw_advantage and returns, all [T] fp32 and 0 outside the response mask.

    batch has logprob, value, response_mask, bootstrap, truncated (and ref_logprob with the KL in the reward); score: [B]. kl_coef:
    the controller's current coefficient, used only with the KL in the reward.
    """
    mask = batch["response_mask"]
    kl_in_reward = algorithm.kl.placement == "reward"
    lam_policy: float | Tensor = algorithm.lam
    if algorithm.lam_length_alpha is not None:
        lam_policy = length_adaptive_lambda(tokens_per_sequence(mask, batch.cu_seqlens), algorithm.lam_length_alpha)
    reward, advantage, returns, moments = token_advantages(
        batch["logprob"],
        batch["ref_logprob"] if kl_in_reward else None,
        score,
        batch["value"],
        mask,
        batch.cu_seqlens,
        torch.where(batch["truncated"], batch["bootstrap"], 0.0) if algorithm.bootstrap_truncated else None,
        gamma=algorithm.gamma,
        lam_policy=lam_policy,
        lam_value=algorithm.lam if algorithm.lam_value is None else algorithm.lam_value,
        kl_estimator=algorithm.kl.estimator,
        kl_coef=kl_coef if kl_in_reward else 0.0,
    )
    whitened = whiten_apply(advantage, mask, moments) if algorithm.whiten_advantages else advantage
    return batch.with_fields({"reward": reward, "advantage": whitened, "raw_advantage": advantage, "returns": returns})
