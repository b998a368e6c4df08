"""A supervised run as the PPO run whose updates hold what its steps hold, and whose evaluations are those of the answers that it
generates, if any. Memory, micro-batches and pipelines of an update depend on no more than its sequences."""

from __future__ import annotations

from typing import Any, TypeVar

from megappo.config.reward_sections import EvaluationConfig, RewardConfig
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
from megappo.config.supervised import AnyConfig, PicturedDataConfig, SftConfig, SupervisedConfig

SectionT = TypeVar("SectionT", bound=Section)
IMAGE_KEYS = ("image_key", "max_image_pixels")


def sampling_config(config: AnyConfig) -> TrainConfig | None:
    """Return the configuration by which a run generates and scores: its own, or that of `step_like`; None if it generates
    nothing."""
    if isinstance(config, TrainConfig):
        return config
    return None if config.sampler is None else step_like(config)


def step_like(config: SupervisedConfig) -> TrainConfig:
    """Return the configuration of a PPO run whose updates hold what this run's steps hold, without a critic, and whose evaluations
    are those of this run's generated answers, if there are any. Only then has it a `data.eval` or `evaluations`."""
    trainer, size = (
        config.trainer.model_dump(include=config.trainer.model_fields_set & {"epochs", "steps"}),
        config.trainer.batch_size,
    )
    like: dict[str, Any] = {
        "rollout": RolloutConfig(engine="megatron", samples_per_prompt=config.sequences, max_response_tokens=1),
        "data": DataConfig(
            train=config.data.train,
            prompts_per_step=size,
            max_prompt_tokens=max(1, config.data.max_tokens - 1),
            **{key: getattr(config.data, key) for key in IMAGE_KEYS if isinstance(config.data, PicturedDataConfig)},
        ),
        "trainer": TrainerConfig(**trainer),
    }
    if isinstance(config, SftConfig) and config.rollout is not None:
        data, response = config.data, config.rollout.max_response_tokens
        keys = {
            "answer_key": data.answer_key or data.response_key,
            "max_prompt_tokens": max(1, data.max_tokens - response),
            "prompts_per_step": size,
        }
        evaluated = {"eval_every": config.trainer.eval_every, "eval_before": config.trainer.eval_before}
        like = {
            # Nothing is learned from the answers, so no experts are recorded.
            "rollout": as_section(RolloutConfig, config.rollout).model_copy(update={"replay_experts": "none"}),
            "data": as_section(DataConfig, data).model_copy(update=keys),
            "trainer": TrainerConfig(**trainer, **evaluated),
            "evaluations": {name: EvaluationConfig(data=one) for name, one in config.evaluations.items()},
            "reward": config.reward or RewardConfig(),
        }
    return TrainConfig(
        run=config.run,
        model=config.model,
        kernels=config.kernels,
        policy=as_section(PolicyConfig, config.learner_section),
        reference=as_section(ReferenceConfig, vars(config).get("reference", ReferenceConfig())),
        teacher=as_section(TeacherConfig, vars(config).get("teacher", TeacherConfig())),
        algorithm=AlgorithmConfig(
            estimator=ReinforcePlusPlusConfig(),
            distillation=DistillationConfig() if config.has_teacher else None,
            kl=RewardKLConfig() if config.has_reference else NoKLConfig(),
            mini_batch_size=size * config.sequences,
        ),
        checkpoint=config.checkpoint,
        telemetry=config.telemetry,
        **like,
    )


def as_section(cls: type[SectionT], section: Section) -> SectionT:
    """Make another class's section of the keys that are set and that both have."""
    return cls.model_validate(
        {name: value for name, value in section if name in section.model_fields_set & cls.model_fields.keys()}
    )
