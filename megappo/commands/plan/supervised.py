"""A supervised run as the plan counts it: the PPO step of the same passes and updates, in which nothing is sampled and no critic
trains. Memory, micro-batches and pipelines of an update depend on no more than its sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from megappo.config.layout_checks import reference_is_base
from megappo.config.role_sections import PolicyConfig, ReferenceConfig, TeacherConfig
from megappo.config.run_sections import TrainerConfig
from megappo.config.schema import (
    AlgorithmConfig,
    DataConfig,
    DistillationConfig,
    NoKLConfig,
    ReinforcePlusPlusConfig,
    RewardKLConfig,
    RolloutConfig,
    TrainConfig,
)
from megappo.config.section import Section
from megappo.config.supervised import DpoConfig, KtoLossConfig, LearnedRewardConfig, SftConfig, SupervisedConfig

SectionT = TypeVar("SectionT", bound=Section)
ValueT = TypeVar("ValueT")
POLICY = "policy"
IMAGE_KEYS = ("image_key", "max_image_pixels")


class ScoringConfig(PolicyConfig, LearnedRewardConfig):
    """A reward model that learns, in the policy's place: with its head instead of an output projection."""


def step_like(config: SupervisedConfig) -> TrainConfig:
    """Return the configuration of a PPO run whose updates hold what this run's steps hold."""
    trainer, size = (
        config.trainer.model_dump(include=config.trainer.model_fields_set & {"epochs", "steps"}),
        config.trainer.batch_size,
    )
    return TrainConfig(
        run=config.run,
        model=config.model,
        kernels=config.kernels,
        policy=_as(PolicyConfig, config.learner_section),
        reference=_as(ReferenceConfig, vars(config).get("reference", ReferenceConfig())),
        teacher=_as(TeacherConfig, vars(config).get("teacher", TeacherConfig())),
        algorithm=AlgorithmConfig(
            estimator=ReinforcePlusPlusConfig(),
            distillation=DistillationConfig() if config.has_teacher else None,
            kl=RewardKLConfig() if config.has_reference else NoKLConfig(),
            mini_batch_size=size * config.sequences,
        ),
        rollout=RolloutConfig(engine="megatron", samples_per_prompt=config.sequences, max_response_tokens=1),
        data=DataConfig(
            train=config.data.train,
            prompts_per_step=size,
            max_prompt_tokens=max(1, config.data.max_tokens - 1),
            **{key: getattr(config.data, key) for key in IMAGE_KEYS if isinstance(config, SftConfig)},
        ),
        trainer=TrainerConfig(**trainer),
        checkpoint=config.checkpoint,
        telemetry=config.telemetry,
    )


def planned_step(config: SupervisedConfig) -> TrainConfig:
    """Return `step_like` with the best checkpoint, which the plan counts and which that run could not choose, and with the head of
    a model that scores."""
    step, learner = step_like(config), config.learner_section
    scores = {"policy": _as(ScoringConfig, learner)} if isinstance(learner, LearnedRewardConfig) else {}
    return step.model_copy(update={"trainer": step.trainer.model_copy(update={"keep_best": config.trainer.keep_best}), **scores})


def _as(cls: type[SectionT], section: Section) -> SectionT:
    """Make another class's section of the keys that are set and that both have."""
    return cls.model_validate(
        {name: value for name, value in section if name in section.model_fields_set & cls.model_fields.keys()}
    )


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
