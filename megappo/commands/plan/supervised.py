"""A supervised run as the plan counts it: `config.supervised_step.step_like`, with the names of this run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from megappo.config.layout_checks import reference_is_base
from megappo.config.role_sections import PolicyConfig
from megappo.config.schema import TrainConfig
from megappo.config.supervised import DpoConfig, KtoLossConfig, LearnedRewardConfig, SupervisedConfig
from megappo.config.supervised_step import as_section, step_like

ValueT = TypeVar("ValueT")
POLICY = "policy"


class ScoringConfig(PolicyConfig, LearnedRewardConfig):
    """A reward model that learns, in the policy's place: with its head instead of an output projection."""


def planned_step(config: SupervisedConfig) -> TrainConfig:
    """Return `step_like` with the best checkpoint, which the plan counts and which that run could not choose, and with the head of
    a model that scores."""
    step, learner = step_like(config), config.learner_section
    scores = {"policy": as_section(ScoringConfig, learner)} if isinstance(learner, LearnedRewardConfig) else {}
    return step.model_copy(update={"trainer": step.trainer.model_copy(update={"keep_best": config.trainer.keep_best}), **scores})


def as_planned(config: SupervisedConfig, by_role: Mapping[str, ValueT]) -> dict[str, ValueT]:
    """Name the role that learns as `step_like` does."""
    return {POLICY if role == config.learner else role: value for role, value in by_role.items()}


def unpassed_roles(config: SupervisedConfig) -> frozenset[str]:
    """Roles of `step_like` without a pass before the update of a step: the learner, and a reference that is read once."""
    if not isinstance(config, DpoConfig) or not config.reads_reference:
        return frozenset({POLICY})
    by_learner = isinstance(config.loss, KtoLossConfig) or (config.reference.every_step and reference_is_base(config))
    once = not config.reference.every_step
    return frozenset({*([] if by_learner else [POLICY]), *(["reference"] if once else [])})


def head_notes(config: SupervisedConfig) -> Iterator[str]:
    """Yield a note on a learner that this step names otherwise."""
    if config.learner != POLICY:
        yield f"the {POLICY} of this plan is {config.learner}"


KEYS = {
    "algorithm.mini_batch_size": "trainer.batch_size",
    "data.prompts_per_step": "trainer.batch_size",
    "rollout.max_response_tokens": "data.max_tokens",
}
"""Keys of that step -> the key of a supervised run that sets the same, for messages."""


def own_keys(config: SupervisedConfig, text: str) -> str:
    """Name the keys of a supervised run in a message about its step."""
    for key, own in {**KEYS, f"{POLICY}.": f"{config.learner}."}.items():
        text = text.replace(key, own)
    return text
