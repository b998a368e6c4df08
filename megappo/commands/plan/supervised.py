"""A supervised run as the plan counts it: `config.supervised_step.step_like`, with the names of this run. A run of PPO passes
through as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from megappo.config.layout_checks import reference_is_base
from megappo.config.role_sections import PolicyConfig
from megappo.config.schema import TrainConfig
from megappo.config.supervised import AnyConfig, DpoConfig, KtoLossConfig, LearnedRewardConfig, SupervisedConfig
from megappo.config.supervised_step import as_section, step_like

ValueT = TypeVar("ValueT")
POLICY = "policy"


class ScoringConfig(PolicyConfig, LearnedRewardConfig):
    """A reward model that learns, in the policy's place: with its head instead of an output projection."""


def planned_step(config: AnyConfig) -> TrainConfig:
    """Return `step_like` with the best checkpoint, which the plan counts and which that run could not choose, and with the head of
    a model that scores."""
    if isinstance(config, TrainConfig):
        return config
    step, learner = step_like(config), config.learner_section
    scores = {"policy": as_section(ScoringConfig, learner)} if isinstance(learner, LearnedRewardConfig) else {}
    return step.model_copy(update={"trainer": step.trainer.model_copy(update={"keep_best": config.trainer.keep_best}), **scores})


def _learner(config: AnyConfig) -> str:
    return config.learner if isinstance(config, SupervisedConfig) else POLICY


def as_planned(config: AnyConfig, by_role: Mapping[str, ValueT]) -> dict[str, ValueT]:
    """Name the role that learns as `step_like` does."""
    return {POLICY if role == _learner(config) else role: value for role, value in by_role.items()}


def unpassed_roles(config: AnyConfig) -> frozenset[str]:
    """Roles of `step_like` without a pass before the update of a step: the learner, and a reference that is read once."""
    if isinstance(config, TrainConfig):
        return frozenset()
    if not isinstance(config, DpoConfig) or not config.reads_reference:
        return frozenset({POLICY})
    by_learner = isinstance(config.loss, KtoLossConfig) or (config.reference.every_step and reference_is_base(config))
    once = not config.reference.every_step
    return frozenset({*([] if by_learner else [POLICY]), *(["reference"] if once else [])})


def head_notes(config: AnyConfig) -> Iterator[str]:
    """Yield a note on a learner that this step names otherwise."""
    if _learner(config) != POLICY:
        yield f"the {POLICY} of this plan is {_learner(config)}"


KEYS = {
    "algorithm.mini_batch_size": "trainer.batch_size",
    "data.prompts_per_step": "trainer.batch_size",
    "rollout.max_response_tokens": "data.max_tokens",
}
"""Keys of that step -> the key of a supervised run that sets the same, for messages."""


def own_keys(config: AnyConfig, text: str) -> str:
    """Name the keys of a supervised run in a message about its step."""
    if isinstance(config, TrainConfig):
        return text
    for key, own in {**KEYS, f"{POLICY}.": f"{config.learner}."}.items():
        text = text.replace(key, own)
    return text
