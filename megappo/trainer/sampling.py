"""Builds what a run samples and scores with: rollout engine, sampling settings, scorers, evaluators. `megappo eval` and scripts
that sample without training use it too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from megappo.config.evaluations import config_of_set, longest_sequence_tokens
from megappo.config.rank_ranges import ALL
from megappo.config.reward_sections import EvaluationConfig, RewardConfig
from megappo.config.schema import RolloutConfig, TrainConfig
from megappo.data.tokenizers import Tokenizer
from megappo.engine.base import Engine
from megappo.parallel.layout import layout_of, placement_of
from megappo.rewards.base import PreparedPart
from megappo.rewards.compose import Composition
from megappo.rewards.scorer import Scorer
from megappo.rollout.build import Again, PolicyPlace, build_rollout
from megappo.rollout.environment import with_environment
from megappo.rollout.types import RolloutEngine, SamplingParams
from megappo.trainer.build_roles import spec_of_role
from megappo.trainer.evaluation import Evaluator
from megappo.trainer.prepare.data import EvaluationData
from megappo.trainer.prepare.evaluations import EvaluationSet
from megappo.trainer.prepare.reward_routes import recipe_of
from megappo.trainer.reward_model import ModelScorer


def rollout_of(config: TrainConfig, data: EvaluationData, policy: Engine | None, device: torch.device) -> RolloutEngine:
    """Build the rollout engine, connected to the policy's engine and wrapped in the environment if any. Collective over the world.
    policy: None on ranks where it does not live. Errors as `build_rollout`."""
    engine = engine_of(config, data, policy, device)
    return engine if data.environment is None else with_environment(engine, data.environment, config, data.tokenizer)


def engine_of(
    config: TrainConfig, data: EvaluationData, policy: Engine | None, device: torch.device, again: Again | None = None
) -> RolloutEngine:
    """Build the engine of `rollout_of` without an environment. again: as of `build_rollout`."""
    is_apart = not config.policy.ranks == config.rollout.ranks == ALL
    return build_rollout(
        config,
        policy,
        tokenizer=data.tokenizer,
        max_sequence_tokens=longest_sequence_tokens(config),
        device=device,
        images=None if data.images is None else data.images.store,
        place=place_of_policy(config, None if again is None else again.world_size) if is_apart else None,
        again=again,
    )


def place_of_policy(config: TrainConfig, world_size: int | None = None) -> PolicyPlace:
    """Return ranks, layout and engine of the policy. world_size: of the run; None for the world of now."""
    placement = placement_of(config.policy.ranks, world_size or dist.get_world_size())
    arch = spec_of_role(config, "policy", None).arch
    return PolicyPlace(arch, layout_of(config.policy.parallel, len(placement)), placement, config.policy.engine)


def recorded_experts(config: TrainConfig) -> int:
    """Return how many experts a layer of the policy has, if the sampler records its choice; else 0."""
    moe = spec_of_role(config, "policy", None).arch.moe if config.rollout.replays_experts else None
    return 0 if moe is None else moe.num_experts


def sampling_params(rollout: RolloutConfig, tokenizer: Tokenizer) -> SamplingParams:
    s = rollout.sampling
    return SamplingParams(
        rollout.max_response_tokens, s.temperature, s.top_p, s.top_k, rollout.stop, tokenizer.eos_ids, s.replay_top_k_ids
    )


def scorer_of(
    reward: RewardConfig,
    parts: Mapping[str, PreparedPart],
    on_progress: Callable[[int, int], None] = lambda found, of: None,
    score_model: ModelScorer | None = None,
) -> Scorer:
    """Build the scorer of a run on this rank: its parts (as in `RunData`), and the penalties for a missing end and for length."""
    recipes = {label: {part.label: part.weight for part in parts} for label, parts in reward.recipes.items()}
    made = {name: part.make() for name, part in parts.items() if part.make is not None}
    return Scorer(
        made,
        Composition(recipes, reward.missing_eos_penalty, reward.length_penalty),
        partial(recipe_of, reward),
        on_progress,
        score_model,
    )


def sampling_of_set(s: EvaluationConfig, training: SamplingParams) -> SamplingParams:
    """Return how a set is sampled. training: gives the stops."""
    assert s.max_response_tokens is not None, "evaluation_sets fills it in"
    ends = {"stop": training.stop, "stop_token_ids": training.stop_token_ids}
    return SamplingParams(s.max_response_tokens, s.temperature, s.top_p, s.top_k, **ends)


def evaluators_of_run(
    config: TrainConfig,
    sets: Sequence[EvaluationSet],
    sampling: SamplingParams,
    scorer: Scorer | None,
    score_model: ModelScorer | None,
) -> list[Evaluator]:
    """Build the evaluators of the sets; a set with its own reward gets its own scorer. sampling: of training, for its stops."""

    def scorer_of_set(one: EvaluationSet) -> Scorer:
        view = config_of_set(config, one.settings)
        model = None if score_model is None else score_model.of_prompts(view.data)
        if one.reward is not None:
            return scorer_of(view.reward, one.reward_parts, score_model=model)
        assert scorer is not None, "a set without a reward shares the training's"
        return scorer if model is score_model or model is None else scorer.with_model(model)

    def evaluator_of(one: EvaluationSet) -> Evaluator:
        sampled = one.name, one.settings, one.prompts.prompts, sampling_of_set(one.settings, sampling)
        return Evaluator(*sampled, scorer_of_set(one), one.votes, config.run.seed, config.reward.max_without_verdict)

    return [evaluator_of(one) for one in sets]
