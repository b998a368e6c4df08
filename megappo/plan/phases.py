"""Memory of one rank through the phases of a PPO step, which phase is the tightest for each role, and what would relieve it.

A phase is one role at work while the others rest: what rests is `RoleMemory.resident`, vLLM's weights and cache stay for the whole
run. Reliefs are not rules of thumb: each is the plan worked out again with one key changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterator, Mapping

from megappo.config.schema import RoleConfig, TrainableConfig, TrainConfig
from megappo.plan.estimate import Plan


@dataclass(frozen=True)
class Phase:
    """name: what happens. role: who works, `rollout` for vLLM. rest: bytes of those that do not work and of the worker's own state.
    work: bytes that are there only in this phase.
    """

    name: str
    role: str
    rest: int
    work: int

    @property
    def total(self) -> int:
        return self.rest + self.work


@dataclass(frozen=True)
class Relief:
    """An override and the bytes that it takes off the rank's tightest phase of the role."""

    override: str
    saved: int


def phases(plan: Plan, rank: int) -> list[Phase]:
    """In the order of a step (trainer/ppo.py, stages 2, 4 and 6)."""
    at_rest = plan.rollout_bytes() + sum(plan.stage(role, rank).resident for role in plan.layouts)
    found = [Phase("generate", "rollout" if plan.rollout is not None else "policy", at_rest, 0)]
    for role, name in (("policy", "log-probs"), ("critic", "values"), ("reference", "reference log-probs")):
        if role in plan.layouts:
            memory = plan.stage(role, rank)
            found.append(Phase(name, role, at_rest, memory.offloaded_weights + memory.forward))
    for role in ("critic", "policy"):
        memory = plan.stage(role, rank)
        found.append(Phase(f"{role} update", role, at_rest, memory.offloaded + memory.activations))
        found.append(Phase(f"{role} optimizer step", role, at_rest, memory.offloaded + memory.offloaded_optimizer))
    return found


def tightest(plan: Plan, rank: int) -> dict[str, Phase]:
    """Role -> its fullest phase on this rank."""
    by_role: dict[str, Phase] = {}
    for phase in phases(plan, rank):
        if phase.role not in by_role or phase.total > by_role[phase.role].total:
            by_role[phase.role] = phase
    return by_role


def reliefs(plan: Plan, rank: int, role: str, work_out: Callable[[TrainConfig], Plan], most: int = 2) -> list[Relief]:
    """The changes of one key that take most off the tightest phase of `role`, the largest first.

    work_out: a plan of a changed configuration in the same layouts, which may be too large for the device.
    """
    now = tightest(plan, rank)[role].total
    found = []
    for override, changed in _changes(plan.config, plan.layouts, role):
        saved = now - tightest(work_out(changed), rank)[role].total
        if saved > 0.01 * now:
            found.append(Relief(override, saved))
    return sorted(found, key=lambda relief: -relief.saved)[:most]


def _changes(config: TrainConfig, layouts: Mapping[str, Any], role: str) -> Iterator[tuple[str, TrainConfig]]:
    """One key at a time, of the role that works and of those that rest."""
    if role in layouts:
        section: RoleConfig = getattr(config, role)
        half = section.micro_batch_tokens // 2
        if half:
            yield f"{role}.micro_batch_tokens={half}", _with(config, role, micro_batch_tokens=half)
        if isinstance(section, TrainableConfig) and section.recompute != "full":
            yield f"{role}.recompute=full", _with(config, role, recompute="full")
    for other in layouts:
        offload = getattr(config, other).offload
        for what in ("parameters", "gradients", "optimizer"):
            if getattr(offload, what, True) is False:
                away = offload.model_copy(update={what: True})
                yield f"{other}.offload.{what}=true", _with(config, other, offload=away)
    if role == "rollout" and config.rollout.kv_cache_gib is None:
        share = round(config.rollout.memory_share / 2, 2)
        yield f"rollout.memory_share={share}", _with(config, "rollout", memory_share=share)


def _with(config: TrainConfig, section: str, **changes: Any) -> TrainConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})
