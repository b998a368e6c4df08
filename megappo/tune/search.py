"""Search for the fastest layouts that fit: every role is ranked by itself, then the roles are combined under their common memory.

Roles take turns on the same ranks, so the step time is a sum, and roles constrain each other only through memory: resident memory
of all roles plus the largest working set. Memory is the plan's (`plan/memory.py`, `plan/reserve.py`); a choice carries its plan.
To decide if it fits, a role's fullest stage stands for all of its ranks, which overestimates if the fullest stages of two roles lie
on different ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import Any

from megappo.config.batch import step_arithmetic
from megappo.config.checks import Device
from megappo.config.layout_checks import roles_in_use, value_head_of
from megappo.config.role_sections import PolicyConfig, TrainableConfig
from megappo.config.schema import TrainConfig
from megappo.models.arch import ModelArch
from megappo.models.implementation import Implementation, implementation_of_role
from megappo.parallel.layout import ParallelLayout, layout_of
from megappo.plan.estimate import (
    Plan,
    beside_sampler,
    memory_of_rollout,
    memory_of_stage,
    roles_beside_sampler,
    rollout_dtype,
    work_out,
)
from megappo.plan.memory import ParameterCount, RoleMemory, RolloutMemory, count_parameters, fullest_moment
from megappo.plan.phases import Phase, phases, tightest
from megappo.plan.reserve import layout_bytes, reserve_bytes
from megappo.platform.hardware import Hardware
from megappo.tune.cost import RoleCost, Settings, Workload, role_cost
from megappo.tune.enumerate import layouts, recompute_choices, rollout_sizes, token_budgets
from megappo.tune.generation import GenerationCost, megatron_s, push_s, vllm_cost

ROLLOUT = "rollout"
# Of a working set, which is mostly activations: tests hold their estimate to 10 %.
MARGIN = 1.1
MOST_DOUBLINGS = 8  # up to 256 times the GPUs asked for


@dataclass(frozen=True)
class Machine:
    """Machine that a run is tuned for. implementation: of the layers, whose rules differ."""

    world_size: int
    hardware: Hardware
    implementation: Implementation = "local"

    @property
    def device(self) -> Device:
        return "cuda" if self.hardware.is_gpu() else "cpu"

    @property
    def device_memory(self) -> int | None:
        """Bytes of a GPU, as the plan is given them; None for CPU ranks, whose memory no plan counts."""
        return self.hardware.memory_bytes if self.hardware.is_gpu() else None


@dataclass(frozen=True)
class Need:
    """Bytes of one rank of a role, enough for every stage of its layout. resident: while others work. training: on top of it in
    stages 3 to 6, an estimate. pushed: on top of it while vLLM's weights are awake: while its checkpoint is written, or an
    evaluation scored.
    """

    layout: ParallelLayout
    resident: int
    training: int
    pushed: int


@dataclass(frozen=True)
class Candidate:
    """A role in one layout with its secondary choices. memory: of the fullest stage.

    generate_s: seconds of generation by the role itself (the policy, without vLLM).
    """

    role: str
    settings: Settings
    need: Need
    memory: RoleMemory
    cost: RoleCost
    generate_s: float

    @property
    def layout(self) -> ParallelLayout:
        return self.need.layout

    @property
    def total_s(self) -> float:
        return self.cost.total_s + self.generate_s

    @property
    def recompute(self) -> str:
        """Recomputation of a role that trains; "none" of a frozen one, which has no backward pass."""
        return self.settings.recompute if isinstance(self.settings, TrainableConfig) else "none"

    def overrides(self) -> list[str]:
        """`policy.parallel.tp=8` ...: every chosen key; a layers_per_stage of the user's file is reset."""
        parallel = self.settings.parallel
        split = "null" if not parallel.layers_per_stage else "[" + ",".join(map(str, parallel.layers_per_stage)) + "]"
        sizes = {key: getattr(parallel, key) for key in ("tp", "pp", "vpp", "cp", "ep", "etp")}
        chosen = {**sizes, "sequence_parallel": str(parallel.sequence_parallel).lower(), "layers_per_stage": split}
        lines = [f"{self.role}.parallel.{key}={value}" for key, value in chosen.items()]
        lines.append(f"{self.role}.micro_batch_tokens={self.settings.micro_batch_tokens}")
        if self.cost.is_trained:
            lines.append(f"{self.role}.recompute={self.recompute}")
        return lines


@dataclass(frozen=True)
class RolloutCandidate:
    """vLLM with one tp; all None if the policy's own model generates."""

    tp: int | None
    memory: RolloutMemory | None
    cost: GenerationCost | None

    @property
    def total_s(self) -> float:
        return self.cost.total_s if self.cost is not None else 0.0

    def overrides(self) -> list[str]:
        return [f"rollout.tp={self.tp}"] if self.tp is not None else []


@dataclass(frozen=True)
class Choice:
    """A candidate for every role, and the replicas. plan: that of `megappo plan` for them."""

    roles: Mapping[str, Candidate]
    rollout: RolloutCandidate
    push_s: float
    plan: Plan

    @property
    def total_s(self) -> float:
        return sum(one.total_s for one in self.roles.values()) + self.rollout.total_s + self.push_s

    @property
    def peak(self) -> int:
        """Peak bytes of the fullest rank."""
        return self.plan.peak(self.plan.fullest_rank())

    def peak_of(self, role: str) -> int:
        """Peak bytes of a rank while this role works, over all ranks."""
        return tightest(self.plan)[role][0].total

    def fullest(self) -> tuple[Phase, int]:
        """The phase in which a rank is fullest, and the rank."""
        rank = self.plan.fullest_rank()
        return max(phases(self.plan, rank), key=lambda phase: phase.total), rank


class Search:
    """Candidates of every role of a run. tuned: roles whose layout is open, `rollout` among them; the others keep theirs."""

    def __init__(
        self, config: TrainConfig, archs: Mapping[str, ModelArch], machine: Machine, workload: Workload, tuned: Sequence[str]
    ) -> None:
        self.config, self.archs, self.machine, self.workload, self.tuned = config, archs, machine, workload, tuned
        self._counts: dict[tuple[object, ...], ParameterCount] = {}

    @cached_property
    def candidates(self) -> dict[str, list[Candidate]]:
        """Role -> candidates that fit alone beside some replicas, the fastest first."""
        return {role: sorted(self._all(role), key=lambda one: one.total_s) for role in roles_in_use(self.config)}

    @cached_property
    def rollouts(self) -> list[RolloutCandidate]:
        """Replicas whose KV cache holds one longest sequence, as the plan demands; the fastest first."""
        config, arch, machine = self.config, self.archs["policy"], self.machine
        if config.rollout.engine == "megatron":
            return [RolloutCandidate(None, None, None)]
        sizes = rollout_sizes(arch, machine.world_size) if ROLLOUT in self.tuned else [config.rollout.tp]
        longest = step_arithmetic(config).max_sequence_tokens
        found = []
        for tp in sizes:
            with_tp = config.model_copy(update={"rollout": config.rollout.model_copy(update={"tp": tp})})
            memory = memory_of_rollout(with_tp, arch, machine.device, machine.device_memory)
            if not memory.holds_sequence(longest):
                continue
            dtype, workload = rollout_dtype(config), self.workload
            cost = vllm_cost(arch, with_tp.rollout, dtype, memory, workload, machine.world_size, machine.hardware)
            found.append(RolloutCandidate(tp, memory, cost))
        return sorted(found, key=lambda one: one.total_s)

    def _all(self, role: str) -> Iterator[Candidate]:
        settings: Settings = getattr(self.config, role)
        arch, machine = self.archs[role], self.machine
        if role not in self.tuned:
            own = self.candidate(role, settings)
            yield from [own] if own is not None else []
            return
        budgets = token_budgets(settings.micro_batch_tokens, step_arithmetic(self.config).max_sequence_tokens)
        for parallel in layouts(arch, machine.world_size, self.implementation(role)):
            for recompute in recompute_choices(getattr(settings, "recompute", None)):
                for tokens in budgets:
                    chosen = {"parallel": parallel, "micro_batch_tokens": tokens} | self._recompute(settings, recompute)
                    one = self.candidate(role, settings.model_copy(update=chosen))
                    if one is None:  # budgets ascend: larger micro-batches do not fit either
                        break
                    yield one

    def implementation(self, role: str) -> Implementation:
        """Implementation of a role's layers."""
        return implementation_of_role(self.machine.implementation, self.config.model.impl, getattr(self.config, role).dtype)

    @staticmethod
    def _recompute(settings: Settings, recompute: str) -> dict[str, str]:
        return {"recompute": recompute} if hasattr(settings, "recompute") else {}

    def candidate(self, role: str, settings: Settings) -> Candidate | None:
        """This role with these settings; None if it does not fit even alone, without replicas."""
        arch, hardware = self.archs[role], self.machine.hardware
        stages = self._stages(role, settings)
        need = self._need(role, settings, stages.values())
        if not any(self.fits({role: need}, rollout) for rollout in self.rollouts):
            return None
        layout, generate_s = need.layout, 0.0
        counts = {stage: self._count(arch, layout, stage, value_head_of(settings) is not None) for stage in stages}
        cost = role_cost(role, arch, layout, settings, self.workload, hardware, counts, stages)
        if isinstance(settings, PolicyConfig) and self.config.rollout.engine == "megatron":
            generate_s = megatron_s(arch, layout, settings, self.workload, hardware, counts)
        memory = max(stages.values(), key=lambda one: one.resident + one.active)
        return Candidate(role, settings, need, memory, cost, generate_s)

    def _count(self, arch: ModelArch, layout: ParallelLayout, stage: int, value_head: bool = False) -> ParameterCount:
        """Parameters of one rank of a stage, from shapes."""
        # Counted once for each kind of stage: cp, dp and the order of the chunks do not change it.
        sparse = [arch.is_sparse(layer) for layer in layout.stage_layers(arch.num_layers, stage)]
        ends = stage == 0, stage == layout.pp - 1
        key = (arch, layout.tp, layout.ep, layout.etp, value_head, *ends, len(sparse), sum(sparse))
        if key not in self._counts:
            self._counts[key] = count_parameters(arch, layout, stage, value_head)
        return self._counts[key]

    # ---------------------------------------------------------------------------------------------------------- combined

    def fits(self, needs: Mapping[str, Need], rollout: RolloutCandidate) -> bool:
        """True if these roles and the replicas fit together, with the margin. If some roles do not, neither do more."""
        of_roles = [(need.layout, self._has_experts(role)) for role, need in needs.items()]
        reserve = reserve_bytes(of_roles, self.machine.world_size, rollout.tp or 1) if self.machine.device == "cuda" else 0
        at_rest = reserve + sum(need.resident for need in needs.values())
        training = int(MARGIN * max(need.training for need in needs.values()))
        pushed = max(need.pushed for need in needs.values())
        fullest = fullest_moment(at_rest, training, pushed, rollout.memory, self.config.rollout.sleep)
        return fullest <= self.machine.hardware.usable_bytes

    def _has_experts(self, role: str) -> bool:
        return self.archs[role].moe is not None

    def best(self) -> Choice | None:
        """The fastest candidates that fit together; None if none do. The push of weights, about 1 % of a step, is ignored in the
        choice of the policy."""
        if not self.rollouts or not all(self.candidates.values()):
            return None
        fronts = {
            role: [found[index] for index in self._front(role, [one.need for one in found])]
            for role, found in self.candidates.items()
        }
        best: Choice | None = None
        for rollout in self.rollouts:
            for roles in _combinations(fronts, lambda needs, rollout=rollout: self.fits(needs, rollout), _limit(best, rollout)):
                choice = self.choice(roles, rollout)
                if best is None or choice.total_s < best.total_s:
                    best = choice
        return best

    def _front(self, role: str, needs: Sequence[Need]) -> list[int]:
        """Indices of the Pareto front of `needs` (`pareto`), the best first."""
        return pareto(needs, lambda layout: layout_bytes(layout, self._has_experts(role)) if self.machine.device == "cuda" else 0)

    def choice(self, roles: Mapping[str, Candidate], rollout: RolloutCandidate) -> Choice:
        """These candidates with their plan, fitting or not."""
        policy, machine = roles["policy"], self.machine
        changes: dict[str, Any] = {role: one.settings for role, one in roles.items()}
        if rollout.tp is not None:
            changes[ROLLOUT] = self.config.rollout.model_copy(update={"tp": rollout.tp})
        layouts = {role: one.layout for role, one in roles.items()}
        config = self.config.model_copy(update=changes)
        plan = work_out(config, self.archs, layouts, machine.world_size, machine.device, machine.device_memory, self._count)
        loaded = max(stage.offloaded_weights for stage in plan.memory["policy"])
        return Choice(roles, rollout, push_s(policy.layout, rollout.memory, machine.hardware, loaded), plan)

    def can_fit(self) -> bool:
        """True if anything fits at all. Tries the least demanding layouts and settings of every role, without their time."""
        fronts = []
        for role in roles_in_use(self.config):
            settings: Settings = getattr(self.config, role)
            found = self._least_needs(role, settings) if role in self.tuned else [self._need_of(role, settings)]
            # The least demanding first: a fit is found early, and the front stays short.
            found = sorted(found, key=lambda need: need.resident + need.training)
            fronts.append((role, [found[index] for index in self._front(role, found)]))
        return any(self._can_extend({}, fronts, rollout) for rollout in self.rollouts)

    def _can_extend(
        self, chosen: Mapping[str, Need], fronts: Sequence[tuple[str, Sequence[Need]]], rollout: RolloutCandidate
    ) -> bool:
        if not fronts:
            return True
        role, needs = fronts[0]
        extended = ({**chosen, role: need} for need in needs)
        return any(self.fits(one, rollout) and self._can_extend(one, fronts[1:], rollout) for one in extended)

    def _least_needs(self, role: str, settings: Settings) -> list[Need]:
        chosen = {"micro_batch_tokens": step_arithmetic(self.config).max_sequence_tokens} | self._recompute(settings, "full")
        least = settings.model_copy(update=chosen)
        found = layouts(self.archs[role], self.machine.world_size, self.implementation(role), frugal=True)
        return [self._need_of(role, least.model_copy(update={"parallel": parallel})) for parallel in found]

    def _need_of(self, role: str, settings: Settings) -> Need:
        return self._need(role, settings, self._stages(role, settings).values())

    def _need(self, role: str, settings: Settings, stages: Collection[RoleMemory]) -> Need:
        return Need(
            layout_of(settings.parallel, self.machine.world_size),
            resident=max(one.resident for one in stages),
            training=max(one.active for one in stages),
            pushed=max(beside_sampler(self.config, role, one) for one in stages)
            if role in roles_beside_sampler(self.config)
            else 0,
        )

    def _stages(self, role: str, settings: Settings) -> dict[int, RoleMemory]:
        """Stage -> memory, of the stages that may be the fullest."""
        arch, layout = self.archs[role], layout_of(settings.parallel, self.machine.world_size)
        config = self.config.model_copy(update={role: settings})
        return {
            stage: memory_of_stage(config, role, arch, layout, stage, self.machine.device, self._count)
            for stage in fullest_stages(arch, layout)
        }

    def beside(self, choice: Choice, role: str) -> list[Candidate]:
        """Candidates of a role that fit beside the other roles of `choice`, the fastest first, each layout once."""
        needs, seen = {name: one.need for name, one in choice.roles.items()}, {}
        for one in self.candidates[role]:
            if one.layout not in seen and self.fits({**needs, role: one.need}, choice.rollout):
                seen[one.layout] = one
        return list(seen.values())

    def rollouts_beside(self, choice: Choice) -> list[RolloutCandidate]:
        needs = {role: one.need for role, one in choice.roles.items()}
        return [one for one in self.rollouts if self.fits(needs, one)]


def fullest_stages(arch: ModelArch, layout: ParallelLayout) -> list[int]:
    """Stages that may be the fullest: the ends, and the first one with the most layers; all stages if layers differ, or if a split
    is so uneven that an early stage with fewer layers holds more micro-batches.
    """
    every = list(range(layout.pp))
    if arch.moe is not None and arch.moe.dense_layers:
        return every
    if not layout.layers_per_stage:
        return sorted({0, layout.pp - 1})
    sizes = [sum(layout.layers_per_stage[stage :: layout.pp]) for stage in every]
    if max(sizes) - min(sizes) > 1:
        return every
    return sorted({0, sizes.index(max(sizes)), layout.pp - 1})


def pareto(needs: Sequence[Need], communicators: Callable[[ParallelLayout], int]) -> list[int]:
    """Indices of the needs that no earlier one undercuts in every respect. communicators: bytes of a layout's own communicators."""
    # Counted as if no other role had the same layout and shared them: combining all layouts that could be shared takes too long.
    front: list[tuple[int, int, int]] = []
    places = []
    for place, need in enumerate(needs):
        own = need.resident + communicators(need.layout), need.training, need.pushed
        if not any(other[0] <= own[0] and other[1] <= own[1] and other[2] <= own[2] for other in front):
            front.append(own)
            places.append(place)
    return places


def _limit(best: Choice | None, rollout: RolloutCandidate) -> float:
    return float("inf") if best is None else best.total_s - rollout.total_s


def _combinations(
    fronts: Mapping[str, Sequence[Candidate]], fits: Callable[[Mapping[str, Need]], bool], limit_s: float
) -> Iterator[dict[str, Candidate]]:
    """Combinations of one of each front that fit together, each faster than those before. fronts: the fastest first. fits: takes
    a subset of the roles; once false, more roles do not fit either.
    """
    best = limit_s
    roles = list(fronts)
    fastest = [min(one.total_s for one in front) for front in fronts.values()]

    def extend(chosen: dict[str, Candidate], needs: dict[str, Need], seconds: float) -> Iterator[dict[str, Candidate]]:
        nonlocal best
        depth = len(chosen)
        if depth == len(roles):
            best = seconds
            yield chosen
            return
        role, rest = roles[depth], sum(fastest[depth + 1 :])
        for one in fronts[role]:
            total = seconds + one.total_s
            if total + rest >= best:  # the fastest first: no later one of this front is better
                return
            together = {**needs, role: one.need}
            if fits(together):
                yield from extend({**chosen, role: one}, together, total)

    return extend({}, {}, 0.0)


def larger_worlds(machine: Machine) -> list[int]:
    """Numbers of GPUs by doubling, in whole nodes if more than one. Layouts that are kept divide them too."""
    sizes, per_node = [machine.world_size], machine.hardware.gpus_per_node
    for _ in range(MOST_DOUBLINGS):
        twice = 2 * sizes[-1]
        sizes.append(twice if twice <= per_node else lcm(twice, per_node))
    return sizes[1:]


def gpus_needed(search: Search) -> int | None:
    """The smallest of `larger_worlds` on which some layout fits; None if none does on the largest."""
    for world_size in larger_worlds(search.machine):
        machine = replace(search.machine, world_size=world_size)
        if Search(search.config, search.archs, machine, search.workload, search.tuned).can_fit():
            return world_size
    return None
