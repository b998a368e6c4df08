"""Batch arithmetic of a PPO step: samples, mini-batches and optimizer steps.

Used by the checks, by `megappo plan` and by the trainer, so that all three count alike. Plain integers, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from megappo.config.schema import TrainConfig


@dataclass(frozen=True)
class StepArithmetic:
    """Counts of one PPO step. `optimizer_steps` are those of the critic; the policy makes as many unless target_kl stops it."""

    prompts: int
    samples: int
    mini_batches: int
    optimizer_steps: int
    max_sequence_tokens: int


def step_arithmetic(config: TrainConfig) -> StepArithmetic:
    """Count the parts of one PPO step."""
    samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
    mini_batches = samples // config.algorithm.mini_batch_size  # exact: `checks.py` refuses a remainder
    return StepArithmetic(
        prompts=config.data.prompts_per_step,
        samples=samples,
        mini_batches=mini_batches,
        optimizer_steps=mini_batches * config.algorithm.ppo_epochs,
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
