"""Rules about parallel sizes and the number of ranks that hold for every model. Limits of a model (heads, layers, experts) are
checked in `megappo/trainer/prepare/layouts.py`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Literal

from megappo.config.batch import nearest_divisors
from megappo.config.errors import ConfigError, problem
from megappo.config.evaluations import rewards_of
from megappo.config.keys import section_class
from megappo.config.rank_ranges import ALL, ranges_text, ranks_of
from megappo.config.reward_sections import RewardConfig
from megappo.config.role_sections import (
    AnyCriticConfig,
    FrozenConfig,
    ParallelConfig,
    RewardModelConfig,
    RoleConfig,
    TrainableConfig,
    further_role,
    is_critic,
    key_of_role,
    section_of,
)
from megappo.config.schema import RolloutConfig, SamplerConfig, TrainConfig
from megappo.config.supervised import AnyConfig, LearnedRewardConfig, SupervisedConfig


def role_sections(config: AnyConfig) -> dict[str, RoleConfig]:
    """Map every role that the configuration knows to its section."""
    values, found = vars(config), {}
    for name in _role_names(type(config)):
        found[name] = values[name]
        if name == "critic":
            found |= {further_role(other): section for other, section in values["critics"].items()}
    return found


@cache  # a search of layouts asks for the roles of each of its configurations
def _role_names(cls: type[AnyConfig]) -> tuple[str, ...]:
    classes = {name: section_class(field) for name, field in cls.model_fields.items()}
    return tuple(name for name, section in classes.items() if section is not None and issubclass(section, RoleConfig))


def roles_in_use(config: AnyConfig) -> dict[str, ParallelConfig]:
    """Map every role that this configuration builds to its parallel sizes."""
    roles = {name: section.parallel for name, section in role_sections(config).items()}
    if isinstance(config, SupervisedConfig):
        if not config.has_reference or reference_is_base(config):
            roles.pop("reference", None)
        if not config.has_teacher:
            roles.pop("teacher", None)
        return roles
    if reads_trajectories(config):
        return {name: sizes for name, sizes in roles.items() if is_critic(name)}  # no sampling, no scoring
    if config.algorithm.kl.placement == "none" or reference_is_base(config):
        del roles["reference"]  # no KL, or the policy's own base is the reference
    if config.algorithm.distillation is None:
        del roles["teacher"]
    if not scores_with_model(config):
        del roles["reward_model"]
    if not config.algorithm.has_critic:
        roles = {name: sizes for name, sizes in roles.items() if not is_critic(name)}  # their values are not used
    return roles


def reference_is_base(config: AnyConfig) -> bool:
    """True if the reference is the policy without its adapters, so that no separate model is built."""
    if isinstance(config, SupervisedConfig):
        adapted = config.learner_section.lora is not None
        return config.has_reference and adapted and section_of(config, "reference").model is None
    if config.algorithm.kl.placement == "none" or reads_trajectories(config):
        return False
    return config.policy.lora is not None and config.reference.model is None


def scores_with_model(config: TrainConfig) -> bool:
    """True if the training's reward or an evaluation's uses the reward model."""
    return any(map(uses_model, rewards_of(config)))


def uses_model(reward: RewardConfig) -> bool:
    return any(part.model is not None for parts in reward.recipes.values() for part in parts)


def trained_sections(config: AnyConfig) -> dict[str, TrainableConfig]:
    """Map every role with an optimizer, and thus a place in checkpoints, to its section."""
    used = roles_in_use(config)
    if only_pretrains(config):
        used.pop("policy", None)
    return {name: one for name, one in role_sections(config).items() if isinstance(one, TrainableConfig) and name in used}


def only_pretrains(config: AnyConfig) -> bool:
    """True if the critic's warm-up is the whole run: the policy samples and never changes."""
    if isinstance(config, SupervisedConfig):
        return False
    steps, warmup = config.trainer.steps, config.critic.warmup_steps
    return config.algorithm.has_critic and steps is not None and warmup >= steps


def reads_trajectories(config: AnyConfig) -> bool:
    """True if the run trains only critics, on trajectories that another run recorded: no policy is built and nothing samples."""
    return isinstance(config, TrainConfig) and config.critic.warmup_trajectories is not None and only_pretrains(config)


def require_whole_steps(config: TrainConfig, command: str) -> None:
    """Raise ConfigError for a command about sampling steps if the run has none."""
    if reads_trajectories(config):
        fix = f"trains critics alone, and `megappo {command}` is about whole steps; set it to null"
        raise ConfigError(problem("critic.warmup.trajectories", config.critic.warmup_trajectories, fix))


def sampler_of(config: AnyConfig) -> SamplerConfig | None:
    """Section of what generates; None if nothing does."""
    if isinstance(config, SupervisedConfig):
        return config.sampler
    return None if reads_trajectories(config) else config.rollout


def value_head_of(section: RoleConfig) -> Literal["zero", "normal", "checkpoint"] | None:
    """Initial weights of a value model's head; None for a language model."""
    if isinstance(section, RewardModelConfig):
        return "checkpoint"
    return section.value_head if isinstance(section, (AnyCriticConfig, LearnedRewardConfig)) else None


def head_rows_of(section: RoleConfig) -> int:
    return section.head_rows if isinstance(section, AnyCriticConfig) else 1


def world_problems(config: AnyConfig, world_size: int) -> Iterator[str]:
    """Yield problems of ranks and parallel sizes that do not fit the world or each other, for any model."""
    wanted = config.run.num_ranks
    if wanted is not None and wanted != world_size:
        fix = f"the run has {world_size} ranks; set it to {world_size} or leave it out, or start {wanted} processes"
        yield problem("run.num_ranks", wanted, fix)
    misplaced = list(placement_problems(config, world_size))
    yield from misplaced
    if misplaced:  # sizes cannot be checked on ranks that may not exist
        return
    for role, parallel in roles_in_use(config).items():
        ranks = section_of(config, role).ranks
        yield from parallel_problems(f"{key_of_role(role)}.parallel", parallel, len(ranks_of(ranks, world_size)), ranks)
    if (sampler := sampler_of(config)) is not None and sampler.engine == "vllm":
        yield from _replica_problems(sampler.tp, sampler.ranks, world_size)


# -------------------------------------------------------------------------------------------------------------- placements


def placements_in_use(config: AnyConfig) -> dict[str, str]:
    """Map every role that is built, and `rollout`, to its `ranks`."""
    places = {role: section_of(config, role).ranks for role in roles_in_use(config)}
    sampler = sampler_of(config)
    return places if sampler is None else {**places, "rollout": sampler.ranks}


def placement_problems(config: AnyConfig, world_size: int) -> Iterator[str]:
    """Yield problems of ranks that the world lacks, that stay idle, or that roles should share and do not."""
    places, outside = placements_in_use(config), False
    for name, text in places.items():
        try:
            ranks_of(text, world_size)
        except ValueError as error:
            outside = True
            yield problem(f"{key_of_role(name)}.ranks", text, str(error))
    if outside:
        return
    if not isinstance(config, TrainConfig):
        if len(places) == 1 and (ranks := next(iter(places.values()))) != ALL:
            key = f"{key_of_role(config.learner)}.ranks"
            yield problem(key, ranks, "fine-tuning trains its one model on all ranks; leave it out, or start fewer ranks")
            return
    hosted = {name: set(ranks_of(text, world_size)) for name, text in places.items()}
    yield from _idle_ranks(hosted, config, world_size)
    if (sampler := sampler_of(config)) is None:
        return  # no other model needs the freed memory or new weights
    if sampler.engine == "megatron" and hosted["rollout"] != hosted["policy"]:
        fix = f"rollout.engine megatron generates with the policy's own shards; set it to policy.ranks, {places['policy']}"
        yield problem("rollout.ranks", sampler.ranks, fix)
    if isinstance(sampler, RolloutConfig) and sampler.max_staleness is not None and sampler.ranks != ALL:
        yield from _mixed_halves(sampler, config, hosted, world_size)  # `staleness_problem` refuses all
    yield from _lonely_offloads(sampler, config, hosted)


def _mixed_halves(sampler: SamplerConfig, config: AnyConfig, hosted: Mapping[str, set[int]], world_size: int) -> Iterator[str]:
    """Refuse roles on ranks that generate beside training, and generation on other ranks than the last ones."""
    first, written = min(hosted["rollout"]), sampler.ranks
    if first == 0 or hosted["rollout"] != set(range(first, world_size)):
        last = ranges_text(range(first or world_size - 1, world_size))
        yield problem("rollout.ranks", written, f"rollout.max_staleness generates on the last ranks, and not on all; use {last}")
        return
    training = ranges_text(range(first))
    for role, ranks in hosted.items():
        if role != "rollout" and ranks & hosted["rollout"]:
            key, value = f"{key_of_role(role)}.ranks", section_of(config, role).ranks
            yield problem(key, value, f"ranks {written} only generate (rollout.max_staleness); use {training}")


def _idle_ranks(hosted: Mapping[str, set[int]], config: AnyConfig, world_size: int) -> Iterator[str]:
    idle = sorted(set(range(world_size)).difference(*hosted.values()))
    if idle:
        ranks = f"rank {idle[0]}" if len(idle) == 1 else f"ranks {ranges_text(idle)}"
        samples = "rollout" in hosted
        key, does = ("rollout", "no role and generate nothing") if samples else (next(iter(hosted)), "no role")
        others = ", ".join(f"{key_of_role(name)}.ranks" for name in hosted if name != key)
        where = f"here or to {others}" if others else "here"
        fix = f"{ranks} of the world would have {does}; add them {where}, or start fewer ranks"
        yield problem(f"{key}.ranks", getattr(config, key).ranks, fix)


def _lonely_offloads(sampler: SamplerConfig, config: AnyConfig, hosted: Mapping[str, set[int]]) -> Iterator[str]:
    """Refuse to free memory for others on ranks that nobody shares."""

    def is_alone(name: str) -> bool:
        return not any(hosted[name] & ranks for other, ranks in hosted.items() if other != name)

    for role, section in role_sections(config).items():
        if role not in hosted or not is_alone(role):
            continue
        if isinstance(section, TrainableConfig | FrozenConfig) and section.offload:
            own = key_of_role(role)
            fix = f"makes room for others, and none shares {own}.ranks = {section.ranks}; leave it out, or share ranks"
            yield problem(f"{own}.offload", list(section.offload), fix)
    if sampler.sleep != "none" and is_alone("rollout"):
        fix = f"makes room for models, and none is on rollout.ranks = {sampler.ranks}; use none, or share ranks"
        yield problem("rollout.sleep", sampler.sleep, fix)


def _replica_problems(tp: int, ranks: str, world_size: int) -> Iterator[str]:
    num_ranks = len(ranks_of(ranks, world_size))
    if num_ranks % tp:
        fix = (
            f"does not divide the {_named(num_ranks, 'rollout', ranks)} into replicas; {_fitting(tp, num_ranks, 'rollout', ranks)}"
        )
        yield problem("rollout.tp", tp, fix)


def parallel_problems(section: str, parallel: ParallelConfig, num_ranks: int, ranks: str = ALL) -> Iterator[str]:
    """Yield problems of one role's sizes. section: such as `policy.parallel`. ranks: as the user wrote them."""
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
    model_ranks = parallel.tp * parallel.cp * parallel.pp  # the rest is data parallel
    if num_ranks % model_ranks:
        cp = f" x cp {parallel.cp}" if parallel.cp > 1 else ""
        sizes = f"tp {parallel.tp}{cp} x pp {parallel.pp} = {model_ranks}"
        role = section.removesuffix(".parallel")
        named, fix = _named(num_ranks, role, ranks), _fitting(model_ranks, num_ranks, role, ranks)
        yield f"{section}: {sizes} does not divide the {named}; {fix}"
    else:
        yield from _expert_problems(section, parallel, num_ranks)


def _expert_problems(section: str, parallel: ParallelConfig, num_ranks: int) -> Iterator[str]:
    ranks = num_ranks // parallel.pp  # experts are spread over all ranks of a stage: tp * cp * dp
    if ranks % (parallel.etp * parallel.ep) == 0:
        return
    stage = f"the {ranks} ranks of a pipeline stage ({num_ranks} ranks / pp {parallel.pp})"
    if ranks % parallel.etp:
        fitting = " or ".join(map(str, nearest_divisors(ranks, parallel.etp)))
        yield problem(f"{section}.etp", parallel.etp, f"does not divide {stage}; use {fitting}")
        return
    fitting = " or ".join(map(str, nearest_divisors(ranks // parallel.etp, parallel.ep)))
    product = f"x etp {parallel.etp} = {parallel.ep * parallel.etp} " if parallel.etp > 1 else ""
    yield problem(f"{section}.ep", parallel.ep, f"{product}does not divide {stage}; use {fitting}")


def _named(num_ranks: int, role: str, ranks: str) -> str:
    return f"{num_ranks} ranks" if ranks == ALL else f"{num_ranks} ranks of {key_of_role(role)}.ranks = {ranks}"


def _fitting(model_ranks: int, num_ranks: int, role: str, ranks: str) -> str:
    below = num_ranks // model_ranks * model_ranks
    fitting = [str(number) for number in (below, below + model_ranks) if number > 0]
    where = "run.num_ranks, or torchrun's --nproc-per-node" if ranks == ALL else f"{key_of_role(role)}.ranks"
    return f"lower the sizes or use {' or '.join(fitting)} ranks ({where})"
