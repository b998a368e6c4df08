"""Builds a run's models from its configuration, for the trainer, `verify` and `tune`; the factory supplies the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch.distributed as dist

from megappo.checkpoint.store import CheckpointStore
from megappo.config.layout_checks import head_rows_of, reference_is_base, roles_in_use, value_head_of
from megappo.config.role_sections import RoleConfig, is_critic, section_of
from megappo.config.schema import TrainConfig
from megappo.config.supervised import AnyConfig, LearnedRewardConfig, SupervisedConfig
from megappo.data.images import ImageStore
from megappo.engine.base import Engine
from megappo.engine.factory import EngineFactory, EngineSpec
from megappo.models.hf_config import arch_for
from megappo.parallel.consensus import on_rank_zero, told_by
from megappo.parallel.layout import Placement, layout_of, placement_of
from megappo.parallel.shares import Shares, shares_of
from megappo.parallel.totals import place_in_world
from megappo.telemetry.runlog import RunLog
from megappo.trainer.prepare.checkpoint_source import critic_source
from megappo.trainer.prepare.layouts import model_paths
from megappo.trainer.roles import BaseOfPolicy, Critic, LanguageModel, Policy, RewardModel, Teacher

T = TypeVar("T")
Role = LanguageModel | Critic | RewardModel

ROLES: dict[str, Callable[[TrainConfig, Engine], Role]] = {
    "policy": lambda config, engine: Policy(engine, _temperature(config), config.algorithm, config.policy.logits_dtype),
    "critic": lambda config, engine: Critic(engine, config.critics_in_use[engine.name].loss, engine.name),  # and every further one
    "reference": lambda config, engine: LanguageModel(
        engine, _temperature(config), config.policy.logits_dtype, replays_experts=config.rollout.replay_experts == "all"
    ),
    "teacher": lambda config, engine: Teacher(engine, _temperature(config), config.policy.logits_dtype),
    "reward_model": lambda config, engine: RewardModel(engine),
}
"""Role -> constructor from (configuration, engine). A new role needs an entry here and a section of the configuration
(`RoleConfig`, `section_of`) with the model's directory and, if it trains, its optimizer."""


def _temperature(config: TrainConfig) -> float:
    return config.rollout.sampling.temperature


def _role_of(config: AnyConfig, name: str, engine: Engine) -> Role:
    """Make the role of an engine; in a supervised run a model without a sampler, or with a value head."""
    if isinstance(config, SupervisedConfig):
        of_logprobs = Teacher if name == "teacher" else LanguageModel
        return RewardModel(engine) if engine.value_head else of_logprobs(engine, temperature=1.0)
    return ROLES["critic" if is_critic(name) else name](config, engine)


def _base_of(config: AnyConfig, engine: Engine) -> BaseOfPolicy:
    """Make the reference that is the base of this engine's model."""
    if isinstance(config, SupervisedConfig):
        return BaseOfPolicy(engine, temperature=1.0)
    how = {"replays_experts": config.rollout.replay_experts == "all"}
    return BaseOfPolicy(engine, _temperature(config), config.policy.logits_dtype, **how)


@dataclass(frozen=True)
class Roles:
    """Roles of one run, in the run's order, which is the same on every rank: work done role by role cannot deadlock."""

    by_name: Mapping[str, Role]
    """Roles on this rank."""
    placements: Mapping[str, Placement]
    """Ranks of every role that has a model of its own."""
    trained: tuple[str, ...]
    """Names of the roles with an optimizer."""
    shares: Mapping[str, Shares]
    """Division of a batch by role."""

    def told(self, name: str, mine: T | None) -> T:
        """Return what the ranks of a role have, which is None elsewhere, on every rank. Collective over the world."""
        members = self.shares[name].members
        if sum(map(len, members)) < place_in_world()[1]:
            mine = told_by(members[0][0], mine)
        return cast(T, mine)

    @property
    def critics(self) -> tuple[str, ...]:
        """Names of the critics on any rank; empty if the estimator needs none."""
        return tuple(name for name in self.trained if is_critic(name))

    @property
    def update_order(self) -> tuple[str, ...]:
        """Names of the trained roles in the order of their updates (stage 6)."""
        return (*self.critics, *(name for name in self.trained if not is_critic(name)))

    @property
    def policy(self) -> Policy | None:
        return cast("Policy | None", self.by_name.get("policy"))

    @property
    def reference(self) -> LanguageModel | None:
        """The reference model, or None on ranks where it does not live; None on all ranks if no KL is measured."""
        return cast("LanguageModel | None", self.by_name.get("reference"))

    @property
    def reward_model(self) -> RewardModel | None:
        """The reward model, or None on ranks where it does not live; None on all ranks if the reward uses none."""
        return cast("RewardModel | None", self.by_name.get("reward_model"))

    @property
    def engines(self) -> dict[str, Engine]:
        """Engines on this rank, each under the name of its own role."""
        return {name: role.engine for name, role in self.by_name.items() if name in self.placements}

    @property
    def trained_engines(self) -> dict[str, Engine | None]:
        """Engines of the trained roles, whose state a checkpoint holds; None where a role does not live on this rank."""
        return {name: self.engines.get(name) for name in self.trained}


def build_roles(
    config: AnyConfig,
    engines: EngineFactory,
    total_updates: Mapping[str, int],
    *,
    random_weights: bool = False,
    images: ImageStore | None = None,
) -> Roles:
    """Build all roles that `config` uses, in their order. Collective over the world. ValueError if a model cannot be built.
    total_updates: trained role -> optimizer steps of the whole run, for its schedule. random_weights, images: see `EngineSpec`."""
    sections: dict[str, RoleConfig] = {name: section_of(config, name) for name in roles_in_use(config)}
    engines.connect(sections.values())
    how: dict[str, Any] = {"random_weights": random_weights, "images": images}
    built = {name: build_role(config, name, engines, total_updates.get(name), **how) for name in sections}
    world_size = dist.get_world_size()
    placements = {name: placement_of(section.ranks, world_size) for name, section in sections.items()}
    shares = {name: _shares_of(built[name], section, placements[name]) for name, section in sections.items()}
    by_name = {name: role for name, role in built.items() if role is not None}
    if reference_is_base(config):
        shares["reference"] = shares[config.learner]
        if (learner := by_name.get(config.learner)) is not None:
            by_name["reference"] = _base_of(config, learner.engine)
    return Roles(by_name, placements, tuple(name for name in sections if name in total_updates), shares)


def _shares_of(role: Role | None, section: RoleConfig, placement: Placement) -> Shares:
    """Return how the replicas of a role divide a batch: from its engine, or from its section on ranks without it."""
    if role is not None:
        return role.engine.shares
    return shares_of(layout_of(section.parallel, len(placement)), placement.ranks)


def build_role(
    config: AnyConfig,
    name: str,
    engines: EngineFactory,
    total_updates: int | None,
    *,
    random_weights: bool = False,
    images: ImageStore | None = None,
) -> Role | None:
    """Build one role; None on ranks where it does not live. Collective over the world.
    total_updates: None for a frozen role. random_weights, images: see `EngineSpec`."""
    spec = replace(spec_of_role(config, name, total_updates), random_weights=random_weights, images=images)
    engine = engines.build(spec)
    return None if engine is None else _role_of(config, name, engine)


def spec_of_role(config: AnyConfig, name: str, total_updates: int | None) -> EngineSpec:
    """Describe the engine of a role, with the architecture read from its checkpoint. total_updates: None for a frozen role."""
    section: RoleConfig = section_of(config, name)
    _, path = model_paths(config)[name]
    return EngineSpec(
        role=name,
        model=path,
        arch=replace(arch_for(path, section.engine, head_rows_of(section)), scores_texts=isinstance(section, LearnedRewardConfig)),
        section=section,
        value_head=value_head_of(section),
        total_updates=total_updates,
        seed=config.run.seed,
    )


def load_critics(config: TrainConfig, engines: Mapping[str, Engine], log: RunLog) -> None:
    """Load `critic.checkpoint`, where set, over the weights of `critic.model`, for every critic. engines: role -> engine here."""
    for role, critic in config.critics_in_use.items():
        # Another run may be writing there: rank 0 decides which of its checkpoints all ranks read.
        spec = spec_of_role(config, role, None)
        find = partial(critic_source, critic, spec.arch, spec.model, role)
        source = on_rank_zero(f"finding {role}.checkpoint", find)
        if source is None:
            continue
        store = CheckpointStore(source.directory, keep_last=1)
        store.load_weights(source.role, engines.get(role), source.step, with_head=source.role != "policy")
        log.note(f"{role}: starts from the {source.role} of step {source.step} in {source.directory}")
