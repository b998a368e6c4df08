"""Rules about parallel sizes and the number of ranks that hold for every model.

Limits of a model (heads, layers, experts) are checked in `megappo/prepare/model_rules.py`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megappo.config.batch import nearest_divisors
from megappo.config.errors import problem
from megappo.config.evaluations import rewards_of
from megappo.config.reward_sections import RewardConfig
from megappo.config.role_sections import CriticConfig, ParallelConfig, RewardModelConfig, RoleConfig, TrainableConfig
from megappo.config.schema import SftConfig, TrainConfig


def role_sections(config: TrainConfig | SftConfig) -> dict[str, RoleConfig]:
    """Role -> its section, for all roles that the configuration knows."""
    return {name: section for name, section in config if isinstance(section, RoleConfig)}


def roles_in_use(config: TrainConfig | SftConfig) -> dict[str, ParallelConfig]:
    """Role -> parallel sizes, for the roles that this configuration builds."""
    roles = {name: section.parallel for name, section in role_sections(config).items()}
    if isinstance(config, TrainConfig) and config.algorithm.kl.placement == "none":
        del roles["reference"]  # nothing is measured against it
    if isinstance(config, TrainConfig) and not scores_with_model(config):
        del roles["reward_model"]
    return roles


def scores_with_model(config: TrainConfig) -> bool:
    """True if a part of the reward, or of an evaluation's own, is the reward model."""
    return any(map(uses_model, rewards_of(config)))


def uses_model(reward: RewardConfig) -> bool:
    """True if a part of this reward is the reward model."""
    return any(part.model is not None for parts in reward.recipes.values() for part in parts)


def trained_sections(config: TrainConfig | SftConfig) -> dict[str, TrainableConfig]:
    """Role -> its section, for the roles that have an optimizer and a place in checkpoints."""
    return {name: section for name, section in role_sections(config).items() if isinstance(section, TrainableConfig)}


def value_head_of(section: RoleConfig) -> Literal["zero", "normal", "checkpoint"] | None:
    """Start of a value model's head; None for a language model."""
    if isinstance(section, RewardModelConfig):
        return "checkpoint"
    return section.value_head if isinstance(section, CriticConfig) else None


def world_problems(config: TrainConfig | SftConfig, world_size: int) -> Iterator[str]:
    """Parallel sizes that do not fit the ranks of the run or each other, for any model."""
    wanted = config.run.num_ranks
    if wanted is not None and wanted != world_size:
        fix = f"the run has {world_size} ranks; set it to {world_size} or leave it out, or start {wanted} processes"
        yield problem("run.num_ranks", wanted, fix)
    for role, parallel in roles_in_use(config).items():
        yield from parallel_problems(f"{role}.parallel", parallel, world_size)
    if isinstance(config, TrainConfig) and config.rollout.engine == "vllm" and world_size % config.rollout.tp:
        fix = f"does not divide the {world_size} ranks into replicas; {_worlds(config.rollout.tp, world_size)}"
        yield problem("rollout.tp", config.rollout.tp, fix)


def parallel_problems(section: str, parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    """Problems of one role's sizes on `world_size` ranks. section: `policy.parallel`."""
    if parallel.sequence_parallel and parallel.tp == 1:
        yield problem(f"{section}.sequence_parallel", True, "shards over the tp ranks and needs tp > 1; set tp, or leave it out")
    if parallel.vpp > 1 and parallel.pp == 1:
        yield problem(
            f"{section}.vpp", parallel.vpp, "interleaves the chunks of pipeline stages and needs pp > 1; set pp, or leave it out"
        )
    given, parts = parallel.layers_per_stage, parallel.pp * parallel.vpp
    if given and len(given) != parts:
        stages = f"pp {parallel.pp}" + (f" x vpp {parallel.vpp}" if parallel.vpp > 1 else "")
        fix = f"has {len(given)} entries and {stages} needs {parts}; give one number per stage, or leave it out"
        yield problem(f"{section}.layers_per_stage", list(given), fix)
    model_ranks = parallel.tp * parallel.cp * parallel.pp  # what is left is data parallel
    if world_size % model_ranks:
        cp = f" x cp {parallel.cp}" if parallel.cp > 1 else ""
        sizes = f"tp {parallel.tp}{cp} x pp {parallel.pp} = {model_ranks}"
        yield f"{section}: {sizes} does not divide the {world_size} ranks; {_worlds(model_ranks, world_size)}"
    else:
        yield from _expert_problems(section, parallel, world_size)


def _expert_problems(section: str, parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    """Problems of ep and etp, given sizes of the dense layers that fit."""
    ranks = world_size // parallel.pp  # experts are spread over all ranks of a stage: tp * cp * dp
    if ranks % (parallel.etp * parallel.ep) == 0:
        return
    stage = f"the {ranks} ranks of a pipeline stage ({world_size} ranks / pp {parallel.pp})"
    if ranks % parallel.etp:
        fitting = " or ".join(map(str, nearest_divisors(ranks, parallel.etp)))
        yield problem(f"{section}.etp", parallel.etp, f"does not divide {stage}; use {fitting}")
        return
    fitting = " or ".join(map(str, nearest_divisors(ranks // parallel.etp, parallel.ep)))
    product = f"x etp {parallel.etp} = {parallel.ep * parallel.etp} " if parallel.etp > 1 else ""
    yield problem(f"{section}.ep", parallel.ep, f"{product}does not divide {stage}; use {fitting}")


def _worlds(model_ranks: int, world_size: int) -> str:
    """Name the nearest numbers of ranks that fit."""
    below = world_size // model_ranks * model_ranks
    fitting = [str(ranks) for ranks in (below, below + model_ranks) if ranks > 0]
    return f"lower the sizes or use {' or '.join(fitting)} ranks (run.num_ranks, or torchrun's --nproc-per-node)"
