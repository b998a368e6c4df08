"""Batch arithmetic of a PPO step: samples, mini-batches and optimizer steps.

Used by the checks, by `megappo plan` and by the trainer, so that all three count alike. Plain integers, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from megappo.config.schema import AlgorithmConfig, TrainConfig
from megappo.config.section import LossAggregation


@dataclass(frozen=True)
class UpdateSchedule:
    """Updates of one role in a PPO step: `epochs` passes over all samples, an optimizer step for each mini-batch."""

    epochs: int
    mini_batch_size: int
    loss_aggregation: LossAggregation

    def mini_batches(self, samples: int) -> int:
        """Mini-batches of an epoch."""
        return samples // self.mini_batch_size  # exact: `checks.py` refuses a remainder

    def optimizer_steps(self, samples: int) -> int:
        """Optimizer steps of a PPO step; the policy makes fewer if `target_kl` stops it."""
        return self.epochs * self.mini_batches(samples)


def shared_schedule(algorithm: AlgorithmConfig) -> UpdateSchedule:
    """Schedule of `algorithm`: the policy's, and the critic's but for what its section says."""
    return UpdateSchedule(algorithm.ppo_epochs, algorithm.mini_batch_size, algorithm.loss_aggregation)


def update_schedule(config: TrainConfig, role: str) -> UpdateSchedule:
    """Schedule of a role that trains: the critic's keys, where they are set, replace those of `algorithm`."""
    shared, critic = shared_schedule(config.algorithm), config.critic
    if role != "critic":
        return shared
    return UpdateSchedule(
        shared.epochs if critic.ppo_epochs is None else critic.ppo_epochs,
        shared.mini_batch_size if critic.mini_batch_size is None else critic.mini_batch_size,
        shared.loss_aggregation if critic.loss_aggregation is None else critic.loss_aggregation,
    )


def mini_batch_key(config: TrainConfig, role: str) -> str:
    """Key that says the mini-batch of a role that trains."""
    return (
        "critic.mini_batch_size" if role == "critic" and config.critic.mini_batch_size is not None else "algorithm.mini_batch_size"
    )


@dataclass(frozen=True)
class StepArithmetic:
    """Counts of one PPO step."""

    prompts: int
    samples: int
    max_sequence_tokens: int


def step_arithmetic(config: TrainConfig) -> StepArithmetic:
    """Count the parts of one PPO step."""
    samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
    return StepArithmetic(
        prompts=config.data.prompts_per_step,
        samples=samples,
        max_sequence_tokens=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
    )


def micro_batches_bound(sequences: int, sequence_tokens: int, budget_tokens: int) -> int:
    """Upper bound on the micro-batches of `sequences` sequences of up to `sequence_tokens` tokens under a token budget."""
    # Filled in order, a micro-batch holds at least floor(budget / longest) sequences; one longer than the budget is alone.
    each = max(1, budget_tokens // sequence_tokens)
    return -(-sequences // each)


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """Divisors of `number` next to `wanted`: the largest one up to it and the smallest one above it, if they exist."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d <= wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return below + above
