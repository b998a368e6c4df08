"""Notes for the plan on which prompts a run trains on, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.batch import step_arithmetic
from megappo.config.schema import TrainConfig
from megappo.data.loader import PromptLoader


def sampling_notes(config: TrainConfig, loader: PromptLoader) -> Iterator[str]:
    """Yield lines on partial rollouts, environments, dynamic sampling, weights and the curriculum, where configured."""
    dynamic, step, rollout = config.algorithm.dynamic_sampling, step_arithmetic(config), config.rollout
    if rollout.partial_rollout_tokens is not None:
        yield (
            f"rollout.partial_rollout_tokens = {rollout.partial_rollout_tokens}: a response takes up to {rollout.windows} steps in "
            f"one of the {step.samples:,} places of a step, so the run visits fewer prompts than steps x places; what is "
            "unfinished at its end is dropped"
        )
    if (environment := rollout.environment) is not None:
        longest = config.data.max_prompt_tokens + rollout.max_response_tokens
        where = f"{environment.workers} processes of each rank that asks" if environment.workers else "the ranks themselves"
        yield (
            f"rollout.environment: up to {environment.max_turns} turns in a sequence of at most {longest:,} tokens, observations "
            f"included; {where} answer, and neither their time nor their memory is planned"
        )
        if environment.compaction is not None:
            yield (
                f"rollout.environment.compaction: a trajectory is up to {environment.max_turns} sequences and as many samples; "
                f"memory, optimizer steps and the learning-rate schedule are planned for one each, {step.samples:,} in a step"
            )
    if dynamic is not None:
        yield (
            "algorithm.dynamic_sampling: a share q of prompts with equal scores costs 1 / (1 - q) times the generation and scoring "
            f"of {step.samples:,} responses (2 times at q = 0.5), at most {dynamic.max_rounds} times in {dynamic.max_rounds} rounds"
        )
    if config.data.weight_key is not None:
        yield (
            f"data.weight_key={config.data.weight_key}: an epoch is {loader.num_prompts:,} visits of {loader.num_weighted:,} "
            f"prompts, the heaviest of them up to {loader.most_visits:,} times"
        )
    if config.data.curriculum is not None and config.rollout.samples_per_prompt == 1:
        yield (
            "data.curriculum: with rollout.samples_per_prompt = 1 a prompt has passed always or never after its "
            "first visit, so it comes back with data.curriculum.min_chance"
        )
