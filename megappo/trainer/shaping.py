"""Stage 5: KL-shaped rewards, GAE with separate lambdas for policy and critic, whitening over the whole global batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.algo.aggregation import tokens_per_sequence
from megappo.algo.gae import length_adaptive_lambda
from megappo.data.packing import PackedBatch
from megappo.ops.advantages import token_advantages
from megappo.ops.whiten import whiten_apply

# What stage 5 calls, where the experience is: on the host.
HOST_OPS = ("token_advantages", "whiten_apply")


@dataclass(frozen=True)
class AdvantageShaping:
    """See `config.schema.AlgorithmConfig` for the fields; kl_in_reward is false where the KL is in the loss or nowhere."""

    gamma: float
    lam: float
    lam_value: float | None
    lam_length_alpha: float | None
    kl_in_reward: bool
    kl_estimator: str
    whiten: bool
    bootstrap_truncated: bool

    def apply(self, batch: PackedBatch, score: Tensor, kl_coef: float) -> PackedBatch:
        """Adds reward, advantage (whitened if asked), raw_advantage and returns, all [T] and 0 outside the response mask.

        batch has logprob, value, response_mask, bootstrap, truncated (and ref_logprob with the KL in the reward); score: [B].
        """
        mask = batch["response_mask"]
        lengths = tokens_per_sequence(mask, batch.cu_seqlens)
        lam_policy: float | Tensor = self.lam
        if self.lam_length_alpha is not None:
            lam_policy = length_adaptive_lambda(lengths, self.lam_length_alpha)
        bootstrap = torch.where(batch["truncated"], batch["bootstrap"], 0.0) if self.bootstrap_truncated else None
        reward, advantage, returns, moments = token_advantages(
            batch["logprob"],
            batch["ref_logprob"] if self.kl_in_reward else None,
            score,
            batch["value"],
            mask,
            batch.cu_seqlens,
            bootstrap,
            gamma=self.gamma,
            lam_policy=lam_policy,
            lam_value=self.lam if self.lam_value is None else self.lam_value,
            kl_estimator=self.kl_estimator,
            kl_coef=kl_coef if self.kl_in_reward else 0.0,
        )
        whitened = whiten_apply(advantage, mask, moments) if self.whiten else advantage
        return batch.with_fields({"reward": reward, "advantage": whitened, "raw_advantage": advantage, "returns": returns})
