"""Finds the fastest layouts that fit: every role is ranked by itself, then the roles are combined under their common memory.

Roles take turns on the same ranks, so the step time is a sum and the roles bind each other only through memory: what all of them
keep while others work, and the most of what one needs while it works. A role's fullest stage stands for all of its ranks, which
overestimates where the fullest stages of two roles lie on different ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from megappo.config.batch import step_arithmetic
from megappo.config.layout_checks import roles_in_use
from megappo.config.schema import TrainConfig
from megappo.models.arch import ModelArch
from megappo.models.implementation import Implementation, implementation_of_role
from megappo.parallel.layout import ParallelLayout
from megappo.plan.estimate import memory_of_rollout, memory_of_stage
from megappo.plan.memory import ParameterCount, RoleMemory, RolloutMemory, count_parameters
from megappo.prepare.layouts import layout_of
from megappo.tune.cost import RoleCost, Settings, Workload, role_cost
from megappo.tune.enumerate import layouts, recompute_choices, rollout_sizes, token_budgets
from megappo.tune.generation import GenerationCost, megatron_s, push_s, vllm_cost
from megappo.tune.profiles import Hardware

ROLLOUT = "rollout"
# What a role needs while it works is mostly activations, an estimate that is held to 10 %.
MARGIN = 1.1


@dataclass(frozen=True)
class Machine:
    """What a run is tuned for. implementation: of the layers, whose rules differ."""

    world_size: int
    hardware: Hardware
    implementation: Implementation = "local"

    @property
    def device(self) -> str:
        return "cuda" if self.hardware.is_gpu() else "cpu"


@dataclass(frozen=True)
class Candidate:
    """A role in one layout with its secondary choices. memory: of the fullest stage; resident, active: the most of any stage, the
    latter with its margin.

    generate_s: of generation by the role itself (the policy, where there is no vLLM).
    """

    role: str
    settings: Settings
    layout: ParallelLayout
    cost: RoleCost
    generate_s: float
    memory: RoleMemory
    resident: int
    active: int

    @property
    def total_s(self) -> float:
        return self.cost.total_s + self.generate_s

    def overrides(self) -> list[str]:
        """`policy.parallel.tp=8` ...: everything that was chosen; a split that the file names is taken back."""
        parallel = self.settings.parallel
        split = "null" if not parallel.layers_per_stage else "[" + ",".join(map(str, parallel.layers_per_stage)) + "]"
        sizes = {key: getattr(parallel, key) for key in ("tp", "pp", "vpp", "cp", "ep", "etp")}
        chosen = {**sizes, "sequence_parallel": str(parallel.sequence_parallel).lower(), "layers_per_stage": split}
        lines = [f"{self.role}.parallel.{key}={value}" for key, value in chosen.items()]
        lines.append(f"{self.role}.micro_batch_tokens={self.settings.micro_batch_tokens}")
        if self.cost.is_trained:
            lines.append(f"{self.role}.recompute={self.settings.recompute}")
        return lines


@dataclass(frozen=True)
class RolloutCandidate:
    """vLLM with one tp; all None where the policy's own model generates."""

    tp: int | None
    memory: RolloutMemory | None
    cost: GenerationCost | None

    @property
    def total_s(self) -> float:
        return self.cost.total_s if self.cost is not None else 0.0

    @property
    def bytes(self) -> int:
        """What vLLM keeps on a rank for the whole run."""
        return self.memory.weights + max(0, self.memory.kv_cache or 0) if self.memory is not None else 0

    def overrides(self) -> list[str]:
        return [f"rollout.tp={self.tp}"] if self.tp is not None else []


@dataclass(frozen=True)
class Choice:
    """A candidate for every role, and the replicas."""

    roles: Mapping[str, Candidate]
    rollout: RolloutCandidate
    push_s: float

    @property
    def total_s(self) -> float:
        return sum(one.total_s for one in self.roles.values()) + self.rollout.total_s + self.push_s

    @property
    def peak(self) -> int:
        """Bytes of one rank in its fullest moment."""
        return peak(self.roles.values(), self.rollout)

    def with_role(self, candidate: Candidate) -> Choice:
        return replace(self, roles={**self.roles, candidate.role: candidate})

    def peak_of(self, role: str) -> int:
        """Bytes of one rank while this role works."""
        return self.rollout.bytes + sum(one.resident for one in self.roles.values()) + self.roles[role].active


def peak(roles: Iterable[Candidate], rollout: RolloutCandidate) -> int:
    """What everybody keeps, and the most that one role needs while it works."""
    roles = list(roles)
    return rollout.bytes + sum(one.resident for one in roles) + max(one.active for one in roles)


class Search:
    """The candidates of every role of a run. tuned: roles whose layout is open, `rollout` among them; the others keep theirs."""

    def __init__(
        self, config: TrainConfig, archs: Mapping[str, ModelArch], machine: Machine, workload: Workload, tuned: Sequence[str]
    ) -> None:
        self.config, self.archs, self.machine, self.workload, self.tuned = config, archs, machine, workload, tuned
        self._counts: dict[tuple[object, ...], ParameterCount] = {}

    @cached_property
    def candidates(self) -> dict[str, list[Candidate]]:
        """Role -> those that fit alone beside the smallest replicas, the fastest first."""
        room = self.machine.hardware.usable_bytes - min(one.bytes for one in self.rollouts) if self.rollouts else 0
        found = {}
        for role in roles_in_use(self.config):
            fitting = (one for one in self._all(role) if one.resident + one.active <= room)
            found[role] = sorted(fitting, key=lambda one: one.total_s)
        return found

    @cached_property
    def rollouts(self) -> list[RolloutCandidate]:
        """Those whose cache holds one sequence at its longest, as the plan demands; the fastest first."""
        config, arch, machine = self.config, self.archs["policy"], self.machine
        if config.rollout.engine == "megatron":
            return [RolloutCandidate(None, None, None)]
        sizes = rollout_sizes(arch, machine.world_size) if ROLLOUT in self.tuned else [config.rollout.tp]
        longest = step_arithmetic(config).max_sequence_tokens
        found = []
        for tp in sizes:
            rollout = config.rollout.model_copy(update={"tp": tp})
            with_tp = config.model_copy(update={"rollout": rollout})
            known = machine.hardware.memory_bytes if machine.device == "cuda" else None
            memory = memory_of_rollout(with_tp, arch, machine.device, known)
            if memory.kv_cache is not None and memory.kv_cache < longest * memory.kv_bytes_per_token:
                continue
            dtype = config.policy.dtype if rollout.dtype == "auto" else rollout.dtype
            cost = vllm_cost(arch, rollout, dtype, memory, self.workload, machine.world_size, machine.hardware)
            found.append(RolloutCandidate(tp, memory, cost))
        return sorted(found, key=lambda one: one.total_s)

    def _all(self, role: str) -> Iterator[Candidate]:
        settings: Settings = getattr(self.config, role)
        arch, machine = self.archs[role], self.machine
        if role not in self.tuned:
            own = self.candidate(role, settings)
            assert own is not None
            yield own
            return
        longest, room = step_arithmetic(self.config).max_sequence_tokens, machine.hardware.usable_bytes
        budgets = token_budgets(settings.micro_batch_tokens, longest)
        for parallel in layouts(arch, machine.world_size, self.implementation(role)):
            for recompute in recompute_choices(getattr(settings, "recompute", None)):
                for tokens in budgets:
                    chosen = {"parallel": parallel, "micro_batch_tokens": tokens} | self._recompute(settings, recompute)
                    one = self.candidate(role, settings.model_copy(update=chosen), room)
                    if one is None:  # nor would larger micro-batches fit
                        break
                    yield one

    def implementation(self, role: str) -> Implementation:
        """Of the layers of a role."""
        return implementation_of_role(self.machine.implementation, self.config.model.impl, getattr(self.config, role).dtype)

    @staticmethod
    def _recompute(settings: Settings, recompute: str) -> dict[str, str]:
        return {"recompute": recompute} if hasattr(settings, "recompute") else {}

    def candidate(self, role: str, settings: Settings, room: int | None = None) -> Candidate | None:
        """This role with these settings; None where it does not fit into `room` bytes by itself."""
        arch, machine, hardware = self.archs[role], self.machine, self.machine.hardware
        layout = layout_of(settings.parallel, machine.world_size)
        stages = self._stages(role, settings)
        resident, active = _needs(stages)
        if room is not None and resident + active > room:
            return None
        counts = {stage: self._count(arch, layout, stage, role == "critic") for stage in fullest_stages(arch, layout)}
        cost = role_cost(role, arch, layout, settings, self.workload, hardware, counts)
        generates = role == "policy" and self.config.rollout.engine == "megatron"
        generate_s = megatron_s(arch, layout, settings, self.workload, hardware, counts) if generates else 0.0
        memory = max(stages, key=lambda one: one.resident + one.active)
        return Candidate(role, settings, layout, cost, generate_s, memory, resident, active)

    def _count(self, arch: ModelArch, layout: ParallelLayout, stage: int, value_head: bool = False) -> ParameterCount:
        """By shapes, once for each kind of stage: neither cp nor dp nor the order of the chunks changes it."""
        sparse = [arch.is_sparse(layer) for layer in layout.stage_layers(arch.num_layers, stage)]
        ends = stage == 0, stage == layout.pp - 1
        key = (arch, layout.tp, layout.ep, layout.etp, value_head, *ends, len(sparse), sum(sparse))
        if key not in self._counts:
            self._counts[key] = count_parameters(arch, layout, stage, value_head)
        return self._counts[key]

    # ---------------------------------------------------------------------------------------------------------- combined

    def best(self) -> Choice | None:
        """The fastest candidates that fit together; None where none do. Between policies the push of weights, about a percent of
        a step, does not decide."""
        if not self.rollouts or not all(self.candidates.values()):
            return None
        room = self.machine.hardware.usable_bytes
        fronts = {role: pareto(found) for role, found in self.candidates.items()}
        best: Choice | None = None
        for rollout in self.rollouts:
            for roles in _combinations(list(fronts.values()), room - rollout.bytes, _limit(best, rollout)):
                by_role = {one.role: one for one in roles}
                choice = self.choice(by_role, rollout)
                if best is None or choice.total_s < best.total_s:
                    best = choice
        return best

    def choice(self, roles: Mapping[str, Candidate], rollout: RolloutCandidate) -> Choice:
        policy, hardware = roles["policy"], self.machine.hardware
        return Choice(roles, rollout, push_s(policy.layout, rollout.memory, hardware, policy.memory.offloaded_weights))

    def fits(self) -> bool:
        """Whether anything fits at all: of every role the layouts and the settings that need least are tried, and their time is
        not."""
        usable = self.machine.hardware.usable_bytes
        room = usable - min((one.bytes for one in self.rollouts), default=usable)
        needs = []
        for role in roles_in_use(self.config):
            settings: Settings = getattr(self.config, role)
            found = [self._memory(role, settings)] if role not in self.tuned else self._least_memory(role, settings, room)
            front = []
            for resident, active in sorted(found):
                if not front or active < front[-1][1]:
                    front.append((resident, active))
            needs.append(front)
        return any(
            sum(resident for resident, _ in chosen) + max(active for _, active in chosen) <= room for chosen in product(*needs)
        )

    def _least_memory(self, role: str, settings: Settings, room: int) -> list[tuple[int, int]]:
        if room <= 0:
            return []
        chosen = {"micro_batch_tokens": step_arithmetic(self.config).max_sequence_tokens} | self._recompute(settings, "full")
        least = settings.model_copy(update=chosen)
        found = layouts(self.archs[role], self.machine.world_size, self.implementation(role), frugal=True)
        return [self._memory(role, least.model_copy(update={"parallel": parallel})) for parallel in found]

    def _memory(self, role: str, settings: Settings) -> tuple[int, int]:
        """(resident, active) of the fullest stages."""
        return _needs(self._stages(role, settings))

    def _stages(self, role: str, settings: Settings) -> list[RoleMemory]:
        arch, layout = self.archs[role], layout_of(settings.parallel, self.machine.world_size)
        config = self.config.model_copy(update={role: settings})
        return [
            memory_of_stage(config, role, arch, layout, stage, self.machine.device, self._count)
            for stage in fullest_stages(arch, layout)
        ]

    def beside(self, choice: Choice, role: str) -> list[Candidate]:
        """The candidates of a role that fit with what the others have in `choice`, the fastest first, each layout once."""
        room = self.machine.hardware.usable_bytes
        seen: dict[ParallelLayout, Candidate] = {}
        for one in self.candidates[role]:
            if one.layout not in seen and choice.with_role(one).peak <= room:
                seen[one.layout] = one
        return list(seen.values())

    def rollouts_beside(self, choice: Choice) -> list[RolloutCandidate]:
        room = self.machine.hardware.usable_bytes
        return [one for one in self.rollouts if peak(choice.roles.values(), one) <= room]


def _needs(stages: Sequence[RoleMemory]) -> tuple[int, int]:
    """(resident, active) that cover every stage, the latter with its margin."""
    return max(one.resident for one in stages), int(MARGIN * max(one.active for one in stages))


def fullest_stages(arch: ModelArch, layout: ParallelLayout) -> list[int]:
    """Stages among which the fullest is: the ends, the first one with the most layers, and all where layers differ."""
    if arch.moe is not None and arch.moe.dense_layers:
        return list(range(layout.pp))
    if not layout.layers_per_stage:
        return sorted({0, layout.pp - 1})
    sizes = [sum(layout.layers_per_stage[stage :: layout.pp]) for stage in range(layout.pp)]
    return sorted({0, sizes.index(max(sizes)), layout.pp - 1})


def pareto(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that no faster one undercuts in both what it keeps and what it needs at work. found: the fastest first."""
    front: list[Candidate] = []
    for one in found:
        if not any(other.resident <= one.resident and other.active <= one.active for other in front):
            front.append(one)
    return front


def _limit(best: Choice | None, rollout: RolloutCandidate) -> float:
    return float("inf") if best is None else best.total_s - rollout.total_s


def _combinations(fronts: Sequence[Sequence[Candidate]], room: int, limit_s: float) -> Iterator[tuple[Candidate, ...]]:
    """One of each front, together within `room` bytes, each faster than the ones before. fronts: the fastest first."""
    best = limit_s
    fastest = [min(one.total_s for one in front) for front in fronts]

    def extend(chosen: tuple[Candidate, ...], seconds: float, resident: int, active: int) -> Iterator[tuple[Candidate, ...]]:
        nonlocal best
        depth = len(chosen)
        if depth == len(fronts):
            best = seconds
            yield chosen
            return
        rest = sum(fastest[depth + 1 :])
        for one in fronts[depth]:
            total = seconds + one.total_s
            if total + rest >= best:
                return
            keeps, needs = resident + one.resident, max(active, one.active)
            if keeps + needs <= room:
                yield from extend((*chosen, one), total, keeps, needs)

    return extend((), 0.0, 0, 0)
