"""Memory of one rank through the phases of a PPO step, and the tightest phase of each role. In each phase one role works and the
others rest. Remedies for a tightest phase: one key is changed and the plan computed again; only configurations that `megappo plan`
accepts and that shrink the phase are proposed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

from megappo.commands.plan.estimate import Plan, beside_sampler, check_kv_cache, roles_beside_sampler, sequences_at_once, work_out
from megappo.commands.plan.memory import Moment, RoleMemory
from megappo.commands.plan.reserve import MOST_PEERS
from megappo.config.errors import ConfigError
from megappo.config.layout_checks import roles_in_use, trained_sections, value_head_of, world_problems
from megappo.config.role_sections import RewardModelConfig, RoleConfig, TrainableConfig, key_of_role, section_of, with_sections
from megappo.config.schema import TrainConfig
from megappo.trainer.prepare.layouts import check_layouts


@dataclass(frozen=True)
class Phase:
    """Memory of one rank while one role works, in bytes."""

    name: str
    role: str
    """The role at work; `rollout` is vLLM."""
    rest: int
    """Resident state of all roles, the step's experience, the reserve, and the part of vLLM that does not sleep."""
    work: int
    """Bytes that exist only in this phase."""

    @property
    def total(self) -> int:
        return self.rest + self.work


def phases(plan: Plan, rank: int) -> list[Phase]:
    """Phases of one rank in the order of a step: stages 2, 3, 4, 6, 7 and 8 of trainer/ppo.py."""
    # The buffers of a push to vLLM are not counted.
    at_rest, experience = plan.trainer_at_rest(rank), plan.experience(rank)
    found: list[Phase] = []

    def add(name: str, role: str, work: int, moment: Moment = "train") -> None:
        beside = plan.rollout_bytes(moment) if plan.generates(rank) else 0
        held = experience if moment != "generate" else 0  # from stage 4 to the end of the step
        found.append(Phase(name, role, beside + at_rest + held, work))

    def memory(role: str) -> RoleMemory:
        return plan.stage(role, rank)

    here = plan.roles_on(rank)
    if plan.generates(rank):
        add("generate", "rollout", 0, "generate")
    elif plan.samples and plan.rollout is None and "policy" in here:
        add("generate", "policy", memory("policy").inferring, "generate")
    passes = [role for role in forward_passes(plan.config) if not plan.is_supervised or role not in trained_sections(plan.config)]
    for role in filter(here.__contains__, passes):
        add(pass_name(plan.config, role), role, memory(role).inferring)
    if experience and not here:  # a rank that only generates is given a share of the samples
        add("advantages", "rollout", 0)
    trained = [role for role in trained_sections(plan.config) if role in here]
    for role in sorted(trained, key=lambda role: role == "policy"):  # PPO's order of updates: the critics first
        add(f"{role} update", role, memory(role).updating)
        add(f"{role} optimizer step", role, memory(role).stepping)
    if plan.samples and "policy" in here:
        add("push weights", "policy", memory("policy").offloaded_weights, "pushed")
    for role in filter(here.__contains__, roles_beside_sampler(plan.config)):
        # A checkpoint is written role by role, every rank its own part, tensor by tensor.
        what = f"{role} checkpoint" if role in trained_sections(plan.config) else f"{pass_name(plan.config, role)}, evaluation"
        add(what, role, beside_sampler(memory(role), role in trained_sections(plan.config)), "pushed")
    return found


def forward_passes(config: TrainConfig) -> list[str]:
    """Roles in the order of their passes without gradients: the reward model (stage 3) before the others (stage 4)."""
    return sorted(roles_in_use(config), key=lambda role: role != "reward_model")


def pass_name(config: TrainConfig, role: str) -> str:
    """Name of a role's pass without gradients: `log-probs`, `values`, `reference log-probs`, `reward model scores`."""
    section = section_of(config, role)
    if isinstance(section, RewardModelConfig):
        return "reward model scores"
    results = "log-probs" if value_head_of(section) is None else "values"
    return results if role in ("policy", "critic") else f"{role} {results}"


def tightest(plan: Plan) -> dict[str, tuple[Phase, int]]:
    """Role -> (its tightest phase on any rank, the rank)."""
    by_role: dict[str, tuple[Phase, int]] = {}
    for rank in plan.distinct_ranks():
        for phase in phases(plan, rank):
            if phase.role not in by_role or phase.total > by_role[phase.role][0].total:
                by_role[phase.role] = phase, rank
    return by_role


LEAST_SHARE = 0.01  # of the phase; smaller savings are not listed
VLLM_ROOM = 0.025  # of the GPU, 2 GiB of 80
AXES = ("tp", "pp", "cp", "ep")


@dataclass(frozen=True)
class Remedy:
    """An override and the bytes that it saves in the tightest phase of the role."""

    override: str
    saved: int


def remedies(plan: Plan, role: str, most: int = 2) -> list[Remedy]:
    """Changes that save most in the tightest phase of `role`: up to `most` settings, the best first, then one layout."""
    now = tightest(plan)[role][0].total
    found = []
    for changes in (_settings(plan, role), _layouts(plan.config, role)):
        saved = [Remedy(override, now - after) for override, config in changes if (after := _tightest_of(plan, config, role))]
        worth = [remedy for remedy in saved if remedy.saved > LEAST_SHARE * now]
        found.append(sorted(worth, key=lambda remedy: -remedy.saved))
    settings, layouts = found
    return settings[:most] + layouts[:1]  # a layout last: every other cost of the role depends on it


def _tightest_of(plan: Plan, config: TrainConfig, role: str) -> int | None:
    """Bytes of the role's tightest phase under another configuration; None if that is refused for a reason other than size."""
    if next(world_problems(config, plan.world_size), None) is not None:
        return None
    try:
        layouts = check_layouts(config, plan.archs, plan.world_size)
        changed = work_out(config, plan.archs, layouts, plan.world_size, plan.device, plan.device_memory, plan.shown)
        check_kv_cache(changed)
    except ConfigError:
        return None
    return tightest(changed)[role][0].total


def _settings(plan: Plan, role: str) -> Iterator[tuple[str, TrainConfig]]:
    config = plan.config
    if role in plan.layouts:
        section: RoleConfig = section_of(config, role)
        # Halving a budget that no pass reaches has no effect.
        reached = -(-plan.step.samples // plan.layouts[role].dp) * plan.step.max_sequence_tokens
        half = min(section.micro_batch_tokens, reached) // 2
        if half >= plan.step.max_sequence_tokens:
            yield f"{key_of_role(role)}.micro_batch_tokens={half}", _with(config, role, micro_batch_tokens=half)
        if isinstance(section, TrainableConfig) and section.recomputed != "full":
            yield f"{key_of_role(role)}.recompute=full", _with(config, role, recompute="full")
    if plan.device == "cuda":
        if role in plan.layouts and _keeps_inputs(section_of(config, role)):
            yield f"{key_of_role(role)}.recompute=offload", _with(config, role, recompute="offload")
        for other in plan.layouts:
            resting = section_of(config, other)
            for what in resting.may_offload:
                if what not in resting.offload:
                    away = (*resting.offload, what)
                    yield f"{key_of_role(other)}.offload=[{','.join(away)}]", _with(config, other, offload=away)
        if plan.rollout is not None and config.rollout.sleep != "all":
            yield "rollout.sleep=all", _with(config, "rollout", sleep="all")
    share = _smaller_share(plan)
    if share is not None:
        yield f"rollout.memory_share={share}", _with(config, "rollout", memory_share=share)


def _keeps_inputs(section: RoleConfig) -> bool:
    """True if inputs of layers stay on the device although they could wait in host memory."""
    return isinstance(section, TrainableConfig) and section.engine == "fsdp2" and section.recompute == "full"


def _smaller_share(plan: Plan) -> float | None:
    """Smallest memory_share, in steps of 0.05, whose cache holds all sequences that run at once. None if the current share is no
    larger, or if another key sets the cache's size."""
    rollout = plan.rollout
    if rollout is None or plan.device_memory is None or plan.device == "cpu" or plan.config.rollout.kv_cache_gib is not None:
        return None
    needed = rollout.weights + sequences_at_once(plan) * plan.step.max_sequence_tokens * rollout.kv_bytes_per_token
    # VLLM_ROOM: for vLLM's own activations and graphs.
    share = ceil(20 * (needed / plan.device_memory + VLLM_ROOM)) / 20
    return share if share < plan.config.rollout.memory_share else None


def _layouts(config: TrainConfig, role: str) -> Iterator[tuple[str, TrainConfig]]:
    """Changes of one size of the role's layout: each axis doubled, or sequence parallel."""
    if role == "rollout":
        return
    parallel = section_of(config, role).parallel
    for axis in AXES:
        size = 2 * getattr(parallel, axis)
        if axis == "tp" and size > MOST_PEERS + 1:
            continue  # out of a node, where the sums of every layer are slow
        yield f"{key_of_role(role)}.parallel.{axis}={size}", _with(config, role, parallel=parallel.model_copy(update={axis: size}))
    if parallel.tp > 1 and not parallel.sequence_parallel:
        cut = parallel.model_copy(update={"sequence_parallel": True})
        yield f"{key_of_role(role)}.parallel.sequence_parallel=true", _with(config, role, parallel=cut)


def _with(config: TrainConfig, section: str, **changes: Any) -> TrainConfig:
    return with_sections(config, {section: section_of(config, section).model_copy(update=changes)})
