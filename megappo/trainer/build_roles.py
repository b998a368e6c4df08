"""Build of a run's models from its configuration: one table of roles, one way to build them.

The trainer, `verify` and `tune` build their roles here; the factory supplies the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from megappo.config.layout_checks import roles_in_use, value_head_of
from megappo.config.role_sections import RoleConfig
from megappo.config.schema import SftConfig, TrainConfig
from megappo.engine.base import Engine
from megappo.engine.factory import EngineFactory, EngineSpec
from megappo.models.hf_config import read_arch
from megappo.parallel.shares import Shares
from megappo.prepare.layouts import model_paths
from megappo.trainer.roles import Critic, LanguageModel, Policy, RewardModel

Role = LanguageModel | Critic | RewardModel


def _policy(config: TrainConfig, engine: Engine) -> Policy:
    sampling, policy = config.rollout.sampling, config.policy
    return Policy(engine, sampling.temperature, config.algorithm, policy.logits_dtype)


def _critic(config: TrainConfig, engine: Engine) -> Critic:
    return Critic(engine, config.algorithm.value_clip)


def _language_model(config: TrainConfig, engine: Engine) -> LanguageModel:
    return LanguageModel(engine, config.rollout.sampling.temperature, config.policy.logits_dtype)


def _reward_model(config: TrainConfig, engine: Engine) -> RewardModel:
    return RewardModel(engine)


ROLES: dict[str, Callable[[TrainConfig, Engine], Role]] = {
    "policy": _policy,
    "critic": _critic,
    "reference": _language_model,
    "reward_model": _reward_model,
}
"""Role -> constructor from (configuration, engine). A role is an entry here and a section of the configuration (a `RoleConfig` of
the same name) with the model's directory and, if it trains, its optimizer."""


@dataclass(frozen=True)
class Roles:
    """Roles of one run. trained: names of those that have an optimizer. shares: of every role, how it divides a batch."""

    by_name: Mapping[str, Role]
    trained: tuple[str, ...]
    shares: Mapping[str, Shares]

    @property
    def policy(self) -> Policy:
        return cast(Policy, self.by_name["policy"])

    @property
    def critic(self) -> Critic:
        return cast(Critic, self.by_name["critic"])

    @property
    def reference(self) -> LanguageModel | None:
        """The reference model; None if no KL is measured."""
        return cast("LanguageModel | None", self.by_name.get("reference"))

    @property
    def reward_model(self) -> RewardModel | None:
        """The reward model; None if no part of the reward is one."""
        return cast("RewardModel | None", self.by_name.get("reward_model"))

    @property
    def trained_engines(self) -> dict[str, Engine]:
        """Engines of the trained roles, whose state a checkpoint holds."""
        return {name: self.by_name[name].engine for name in self.trained}


def build_roles(config: TrainConfig, engines: EngineFactory, total_updates: Mapping[str, int]) -> Roles:
    """Build all roles that `config` uses, in their order. Collective over the world.

    total_updates: trained role -> optimizer steps of the whole run, for its schedule. ValueError if a model cannot be built.
    """
    in_use = roles_in_use(config)
    engines.connect(in_use.values())
    by_name = {name: build_role(config, name, engines, total_updates.get(name)) for name in in_use}
    shares = {name: role.engine.shares for name, role in by_name.items()}
    return Roles(by_name, tuple(name for name in in_use if name in total_updates), shares)


def build_role(
    config: TrainConfig, name: str, engines: EngineFactory, total_updates: int | None, *, random_weights: bool = False
) -> Role:
    """Build one role. total_updates: None for a frozen role. random_weights: see `EngineSpec`."""
    spec = replace(spec_of_role(config, name, total_updates), random_weights=random_weights)
    return ROLES[name](config, engines.build(spec))


def spec_of_role(config: TrainConfig | SftConfig, name: str, total_updates: int | None) -> EngineSpec:
    """Engine of a role that `config` uses. total_updates: None for a frozen role. Reads the architecture from its checkpoint."""
    section: RoleConfig = getattr(config, name)
    _, path = model_paths(config)[name]
    return EngineSpec(
        role=name,
        model=path,
        arch=read_arch(path),
        section=section,
        value_head=value_head_of(section),
        total_updates=total_updates,
        seed=config.run.seed,
    )
