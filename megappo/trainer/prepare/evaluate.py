"""Prepares `megappo eval`: the configuration without training, the checkpoint and the data."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from megappo.config.batch import step_arithmetic
from megappo.config.checks import Device
from megappo.config.errors import ConfigError, problem
from megappo.config.evaluations import evaluation_sets
from megappo.config.rank_ranges import ALL
from megappo.config.role_sections import CriticConfig, OptimizerConfig, ReferenceConfig, RoleConfig, TeacherConfig
from megappo.config.run_sections import CheckpointConfig, TrainerConfig
from megappo.config.schema import AlgorithmConfig, NoKLConfig, RolloutConfig, TrainConfig
from megappo.models.hf_config import arch_for
from megappo.trainer.prepare.checkpoint_source import PolicySource, policy_source
from megappo.trainer.prepare.checks import check_inputs, check_run

if TYPE_CHECKING:  # imports torch
    from megappo.trainer.prepare.data import EvaluationData

Placed = TypeVar("Placed", bound=RoleConfig | RolloutConfig)


@dataclass(frozen=True)
class PlannedEvaluation:
    """An evaluation that can start. config: as made by `config_of_evaluation`."""

    config: TrainConfig
    source: PolicySource
    data: EvaluationData
    notes: tuple[str, ...]


def plan_evaluation(
    config: TrainConfig, checkpoint: str, only: Sequence[str], world_size: int, device: Device
) -> PlannedEvaluation:
    """Check an evaluation completely without building anything. ValueError, one line, for the first mistake.
    checkpoint: a path for `policy_source`. only: names of sets; empty means all."""
    from megappo.trainer.prepare.data import load_evaluation_data  # imports torch

    config, source = find_evaluation(config, checkpoint, only)
    checked = check_run(config, world_size, device, resume=True)
    data = load_evaluation_data(config, checked.archs["policy"])
    return PlannedEvaluation(config, source, data, (*checked.notes, *data.notes))


def find_evaluation(config: TrainConfig, checkpoint: str, only: Sequence[str]) -> tuple[TrainConfig, PolicySource]:
    """Return the configuration of the evaluation and its checkpoint. ValueError, one line, for a missing checkpoint or set, and as
    `check_inputs`. Imports no torch."""
    source = policy_source(checkpoint)
    config = config_of_evaluation(config, source, only)
    check_inputs(config, resume=True, trains=False)
    source.check_architecture(arch_for(config.policy.model, config.policy.engine), checkpoint)
    return config, source


def config_of_evaluation(config: TrainConfig, source: PolicySource, only: Sequence[str]) -> TrainConfig:
    """Return the configuration with the policy of `source` and these sets (`only`; empty: all), without critic, reference,
    teacher and updates. ConfigError if a set does not exist, or there is none."""
    if not evaluation_sets(config):
        raise ConfigError("nothing to evaluate: the configuration has neither data.eval nor a set in evaluations")
    for name in only:
        if name not in config.evaluations:
            nearest = difflib.get_close_matches(name, config.evaluations, n=1, cutoff=0.4)
            hint = f"did you mean {nearest[0]}? " if nearest else ""
            there = f"{hint}The sets: {', '.join(config.evaluations) or 'none'}"
            raise ConfigError(problem("--only", name, f"is no set of evaluations; {there}"))
    sets = {name: one for name, one in config.evaluations.items() if not only or name in only}
    data = config.data.model_copy(update={"eval": None, "eval_prompts": None}) if only else config.data
    unused = {"offload": (), "optimizer": OptimizerConfig(), "router_aux_coef": 0.0, "router_bias_rate": 0.0}
    policy = config.policy.model_copy(update={**unused, **({"model": source.model} if source.model else {})})
    samples = step_arithmetic(config).samples
    # Every set is due, and all ranks sample: the run's placement shares ranks with a training that is not here.
    return config.model_copy(
        update={
            "policy": _everywhere(policy),
            "critic": CriticConfig(dtype=policy.dtype),
            "critics": {},
            "reference": ReferenceConfig(),
            "teacher": TeacherConfig(),
            "reward_model": _everywhere(config.reward_model),
            "rollout": _everywhere(config.rollout),
            "data": data,
            "algorithm": AlgorithmConfig(mini_batch_size=samples, kl=NoKLConfig()),
            "trainer": TrainerConfig(steps=1),
            "checkpoint": CheckpointConfig(),
            "evaluations": {name: one.model_copy(update={"every": 1, "before": True}) for name, one in sets.items()},
        }
    )


def _everywhere(section: Placed) -> Placed:
    """Put the section on all ranks. A key that the user left out stays unset."""
    return section if section.ranks == ALL else section.model_copy(update={"ranks": ALL})
