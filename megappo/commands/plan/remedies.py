"""Remedies for the tightest phase of a role: change one key and compute the plan again. Only configurations that `megappo plan`
accepts and that shrink the role's tightest phase are proposed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

from megappo.commands.plan.estimate import Plan, check_kv_cache, sequences_at_once, work_out
from megappo.commands.plan.phases import tightest
from megappo.config.errors import ConfigError
from megappo.config.role_sections import RoleConfig, TrainableConfig, key_of_role, section_of, with_sections
from megappo.config.schema import TrainConfig
from megappo.trainer.prepare.layouts import check_layouts

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
    try:
        layouts = check_layouts(config, plan.archs, plan.world_size)
        changed = work_out(config, plan.archs, layouts, plan.world_size, plan.device, plan.device_memory)
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
    if not isinstance(section, TrainableConfig) or section.engine != "fsdp2":
        return False
    return section.recompute == "full"


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
        yield f"{key_of_role(role)}.parallel.{axis}={size}", _with(config, role, parallel=parallel.model_copy(update={axis: size}))
    if parallel.tp > 1 and not parallel.sequence_parallel:
        cut = parallel.model_copy(update={"sequence_parallel": True})
        yield f"{key_of_role(role)}.parallel.sequence_parallel=true", _with(config, role, parallel=cut)


def _with(config: TrainConfig, section: str, **changes: Any) -> TrainConfig:
    return with_sections(config, {section: section_of(config, section).model_copy(update=changes)})
