"""Keys of the configuration as the values that roles and stages take: for a run, and for what replays one (`verify/`)."""

from __future__ import annotations

from megappo.config.schema import AlgorithmConfig, TrainConfig
from megappo.trainer.roles import PolicyLossConfig
from megappo.trainer.shaping import AdvantageShaping
from megappo.trainer.updates import MiniBatches


def policy_loss(algorithm: AlgorithmConfig) -> PolicyLossConfig:
    """The KL counts in the loss only where it is placed there."""
    return PolicyLossConfig(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        entropy_coef=algorithm.entropy_coef,
        kl_coef=algorithm.kl.coef if algorithm.kl.placement == "loss" else 0.0,
        kl_estimator=algorithm.kl.estimator,
        target_kl=algorithm.target_kl,
    )


def advantage_shaping(algorithm: AlgorithmConfig) -> AdvantageShaping:
    """How rewards become advantages and returns (stage 5)."""
    return AdvantageShaping(
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        lam_value=algorithm.lam_value,
        lam_length_alpha=algorithm.lam_length_alpha,
        kl_in_reward=algorithm.kl.placement == "reward",
        kl_estimator=algorithm.kl.estimator,
        whiten=algorithm.whiten_advantages,
        bootstrap_truncated=algorithm.bootstrap_truncated,
    )


def mini_batches(config: TrainConfig) -> MiniBatches:
    """How the experience of a step is cut into optimizer steps (stage 6)."""
    a = config.algorithm
    return MiniBatches(a.mini_batch_size, a.ppo_epochs, a.loss_aggregation, config.rollout.max_response_tokens)
