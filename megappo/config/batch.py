"""Batch arithmetic of a PPO step: samples, mini-batches and optimizer steps. The checks, `megappo plan` and the trainer all count
with it. Plain integers, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from megappo.config.role_sections import key_of_role
from megappo.config.schema import AlgorithmConfig, TrainConfig
from megappo.config.section import LossAggregation


class SampleShare(NamedTuple):
    """Share of a step's samples that a role trains on: those whose number modulo `count` is `index` (AsyPPO, arXiv:2510.01656)."""

    # The samples of a prompt are numbered in a row, so each of several critics gets some of the responses to every prompt.
    index: int = 0
    count: int = 1


WHOLE = SampleShare()


@dataclass(frozen=True)
class UpdateSchedule:
    """Updates of one role in a PPO step: `epochs` passes over its part of the samples, an optimizer step for each mini-batch."""

    epochs: int
    mini_batch_size: int
    loss_aggregation: LossAggregation
    part: SampleShare = WHOLE

    def mini_batches(self, samples: int) -> int:
        """Count the mini-batches of an epoch, given the samples of the whole step. The last is smaller if samples were left out;
        `checks.py` refuses a remainder of whole steps."""
        return -(-len(range(self.part.index, samples, self.part.count)) // self.mini_batch_size)

    def optimizer_steps(self, samples: int) -> int:
        """Count the optimizer steps of a PPO step; the policy makes fewer if `target_kl` stops it."""
        return self.epochs * self.mini_batches(samples)


def shared_schedule(algorithm: AlgorithmConfig) -> UpdateSchedule:
    """Schedule that `algorithm` sets: the policy's, and the default of every critic."""
    return UpdateSchedule(algorithm.ppo_epochs, algorithm.mini_batch_size, algorithm.loss_aggregation)


def update_schedule(config: TrainConfig, role: str) -> UpdateSchedule:
    """Schedule of a trained role. Keys that a critic's section sets replace those of `algorithm`."""
    shared, critics = shared_schedule(config.algorithm), config.critics_in_use
    if role not in critics:
        return shared
    # The shared mini-batch shrinks with a critic's share of the samples, so that it updates as often as a single critic would.
    critic, part = critics[role], SampleShare(list(critics).index(role), len(critics))
    return UpdateSchedule(
        shared.epochs if critic.ppo_epochs is None else critic.ppo_epochs,
        max(1, shared.mini_batch_size // part.count) if critic.mini_batch_size is None else critic.mini_batch_size,
        shared.loss_aggregation if critic.loss_aggregation is None else critic.loss_aggregation,
        part,
    )


def mini_batch_key(config: TrainConfig, role: str) -> str:
    """Name the key that sets the mini-batch of a trained role."""
    critic = config.critics_in_use.get(role)
    own = critic is not None and critic.mini_batch_size is not None
    return f"{key_of_role(role) if own else 'algorithm'}.mini_batch_size"


@dataclass(frozen=True)
class StepArithmetic:
    """Counts of one PPO step."""

    prompts: int
    samples: int
    max_sequence_tokens: int


def step_arithmetic(config: TrainConfig) -> StepArithmetic:
    samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
    return StepArithmetic(
        prompts=config.data.prompts_per_step,
        samples=samples,
        max_sequence_tokens=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
    )


class TextArithmetic(NamedTuple):
    """Texts of `algorithm.ptx` in each update of a role, over all ranks, and the tokens of the longest; (0, 0) without any."""

    count: int = 0
    max_tokens: int = 0


def text_arithmetic(config: TrainConfig, role: str) -> TextArithmetic:
    """Texts in each update of a role; only the policy has any."""
    ptx = config.algorithm.ptx
    return TextArithmetic(ptx.batch_size, ptx.max_tokens) if role == "policy" and ptx is not None else TextArithmetic()


def micro_batches_bound(sequences: int, sequence_tokens: int, budget_tokens: int) -> int:
    """Upper bound on the micro-batches that `sequences` of up to `sequence_tokens` tokens fill under a token budget."""
    # Filled in order, a micro-batch holds at least floor(budget / longest) sequences; one longer than the budget is alone.
    each = max(1, budget_tokens // sequence_tokens)
    return -(-sequences // each)


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """Divisors of `number` next to `wanted`: the largest up to it and the smallest above it, where they exist."""
    # The search is bounded: above 2^40, surely a slip, divisors may be missed, but the refusal stays fast.
    small = [d for d in range(1, min(math.isqrt(number), 1 << 20) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    below = [d for d in divisors if d <= wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return below + above
