"""Search for the fastest layouts that fit: every role is ranked by itself, then the roles are combined under their common memory.

A search is of one placement (`placing.py` tries others). Roles on the same ranks take turns and constrain each other only through
memory: resident memory of all plus the largest working set, as the plan counts it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from math import lcm
from typing import Any

from megappo.commands.plan.estimate import (
    beside_sampler,
    experience_bytes,
    feature_bytes,
    memory_of_rollout,
    memory_of_stages,
    roles_beside_sampler,
    rollout_dtype,
    route_bytes,
    work_out,
)
from megappo.commands.plan.fsdp2 import count_own_parameters
from megappo.commands.plan.memory import RoleMemory, count_parameters, fullest_moment
from megappo.commands.plan.phases import forward_passes
from megappo.commands.plan.reserve import layout_bytes, reserve_bytes
from megappo.commands.tune.candidates import (
    ROLLOUT,
    Candidate,
    Choice,
    Machine,
    Need,
    RolloutCandidate,
    Timetable,
    combinations,
    pareto,
)
from megappo.commands.tune.cost import RoleCost, Settings, Workload, chunks_of_stages, pictures_of, role_cost, stage_of
from megappo.commands.tune.enumerate import layouts, recompute_choices, rollout_sizes, token_budgets
from megappo.commands.tune.generation import GenerationCost, evaluated, evaluations_s, megatron_s, push_s, vllm_cost
from megappo.commands.tune.work import ranks_together
from megappo.config.batch import step_arithmetic
from megappo.config.engine_checks import problems_of_role
from megappo.config.layout_checks import placements_in_use, roles_in_use, trained_sections, value_head_of
from megappo.config.rank_ranges import ALL
from megappo.config.role_sections import PolicyConfig, section_of, with_sections
from megappo.config.schema import RolloutConfig, TrainConfig
from megappo.models.arch import ModelArch
from megappo.models.implementation import Implementation, implementation_of_role
from megappo.parallel.layout import ParallelLayout, layout_of, placement_of
from megappo.telemetry.hardware import Hardware
from megappo.trainer.prepare.layouts import fsdp2_problems

# Factor on a working set, which is mostly activations: tests hold the estimate of activations to 10 %.
MARGIN = 1.1
MOST_DOUBLINGS = 8  # up to 256 times the GPUs asked for


class Search:
    """Candidates of every role of a run, in the placement of its configuration. tuned: roles whose layout is open, `rollout` among
    them; the others keep theirs. placing: `key=value` lines of the placement, if the user's configuration does not have it."""

    def __init__(
        self,
        config: TrainConfig,
        archs: Mapping[str, ModelArch],
        machine: Machine,
        workload: Workload,
        tuned: Sequence[str],
        placing: Sequence[str] = (),
    ) -> None:
        if workload.pictures is None:
            workload = replace(workload, pictures=pictures_of(config, archs))
        self.config, self.archs, self.machine, self.workload, self.tuned = config, archs, machine, workload, tuned
        self.placing = placing
        self.placements = {name: placement_of(ranks, machine.world_size) for name, ranks in placements_in_use(config).items()}
        self.timetable = Timetable(self.placements, forward_passes(config))
        near = {name: ranks_together(placement, machine.hardware.gpus_per_node) for name, placement in self.placements.items()}
        self._hardware = {name: replace(machine.hardware, gpus_per_node=count) for name, count in near.items()}
        self._beside_sampler, self._trained = roles_beside_sampler(config), trained_sections(config)
        self._experience: dict[tuple[tuple[str, int], ...], int] = {}
        # Keys: role, number of its ranks, neighbouring ranks on a node, and settings. Values hold in every placement.
        self._memory: dict[tuple[object, ...], dict[int, RoleMemory]] = {}
        self._costs: dict[tuple[object, ...], tuple[RoleCost, float]] = {}

    def placed(self, config: TrainConfig, placing: Sequence[str]) -> Search:
        """Search this run in another placement, sharing what was counted."""
        other = Search(config, self.archs, self.machine, self.workload, self.tuned, placing)
        other._memory, other._costs = self._memory, self._costs
        return other

    def with_work(self, workload: Workload) -> Search:
        """The same run with other lengths, sharing what was counted."""
        other = Search(self.config, self.archs, self.machine, workload, self.tuned, self.placing)
        other._memory = self._memory
        return other

    def num_ranks(self, name: str) -> int:
        return len(self.placements[name])

    def hardware_of(self, name: str) -> Hardware:
        """The machine as a role or `rollout` sees it: gpus_per_node is the number of its neighbouring ranks on a node."""
        return self._hardware[name]

    @cached_property
    def candidates(self) -> dict[str, list[Candidate]]:
        """Role -> candidates that fit alone beside some replicas, the fastest first."""
        return {role: sorted(self._all(role), key=lambda one: one.total_s) for role in roles_in_use(self.config)}

    @cached_property
    def rollouts(self) -> list[RolloutCandidate]:
        """Replicas whose KV cache holds one longest sequence, as the plan demands, the fastest first."""
        config, arch = self.config, self.archs["policy"]
        if config.rollout.engine == "megatron":
            return [self._by_the_policy()]
        sizes = rollout_sizes(arch, self.num_ranks(ROLLOUT)) if ROLLOUT in self.tuned else [config.rollout.tp]
        longest = step_arithmetic(config).max_sequence_tokens
        found = [one for one in map(self._rollout, sizes) if one.memory is not None and one.memory.holds_sequence(longest)]
        return sorted(found, key=lambda one: one.total_s)

    def _rollout(self, tp: int) -> RolloutCandidate:
        config, arch, machine = self.config, self.archs["policy"], self.machine
        with_tp = config.model_copy(update={"rollout": config.rollout.model_copy(update={"tp": tp})})
        memory = memory_of_rollout(with_tp, arch, machine.device, machine.device_memory)
        num_ranks, hardware, dtype = self.num_ranks(ROLLOUT), self.hardware_of(ROLLOUT), rollout_dtype(config)

        def cost_of(rollout: RolloutConfig, workload: Workload) -> GenerationCost:
            return vllm_cost(arch, rollout, dtype, memory, workload, num_ranks, hardware, machine.vllm)

        cost, calibration = cost_of(with_tp.rollout, self.workload), hardware.calibration
        evaluate_s = evaluations_s(with_tp, self.workload, cost_of)
        evaluate_s = None if evaluate_s is None else evaluate_s * calibration.evaluate
        return RolloutCandidate(tp, memory, cost.times(calibration.generate), evaluate_s)

    def _by_the_policy(self) -> RolloutCandidate:
        """The policy's own model generates, at a cost that depends on its layout."""
        return RolloutCandidate(None, None, None, None if any(evaluated(self.config)) else 0.0)

    def as_written(self) -> Choice:
        """The run as its configuration says, whether it fits or not."""
        roles = {}
        for role in roles_in_use(self.config):
            settings: Settings = section_of(self.config, role)
            stages = self._stages(role, settings)
            roles[role] = self._candidate(role, settings, stages, self._need(role, settings, stages.values()))
        by_vllm = self.config.rollout.engine == "vllm" and not self.workload.given  # a step of examples generates nothing
        return self.choice(roles, self._rollout(self.config.rollout.tp) if by_vllm else self._by_the_policy())

    def _all(self, role: str) -> Iterator[Candidate]:
        settings: Settings = section_of(self.config, role)
        arch = self.archs[role]
        if role not in self.tuned:
            own = self.candidate(role, settings)
            yield from [own] if own is not None else []
            return
        budgets = token_budgets(settings.micro_batch_tokens, step_arithmetic(self.config).max_sequence_tokens)
        for parallel in layouts(arch, self.num_ranks(role), self.implementation(role)):
            for recompute in recompute_choices(getattr(settings, "recompute", None)):
                recomputed = {"recompute": recompute} if hasattr(settings, "recompute") else {}
                chosen = settings.model_copy(update={"parallel": parallel, **recomputed})
                # The engine lacks this layout or recomputation.
                if next(chain(problems_of_role(role, chosen), fsdp2_problems(role, chosen, arch)), None) is not None:
                    continue
                for tokens in budgets:
                    one = self.candidate(role, chosen.model_copy(update={"micro_batch_tokens": tokens}))
                    if one is None:  # budgets ascend: larger micro-batches do not fit either
                        break
                    yield one
                if tokens == budgets[0] and self._is_hopeless(role, chosen.model_copy(update={"micro_batch_tokens": tokens})):
                    break

    def implementation(self, role: str) -> Implementation:
        return implementation_of_role(self.machine.implementation, self.config.model.impl, section_of(self.config, role))

    def candidate(self, role: str, settings: Settings) -> Candidate | None:
        """Build the candidate of a role with these settings; None if it does not fit beside any replicas."""
        stages = self._stages(role, settings)
        need = self._need(role, settings, stages.values())
        return self._candidate(role, settings, stages, need) if self._fits_alone(role, need) else None

    def _is_hopeless(self, role: str, settings: Settings) -> bool:
        """True if the layout of these settings does not fit whatever its passes hold."""
        bare = [replace(one, activations=0, forward=0) for one in self._stages(role, settings).values()]
        return not self._fits_alone(role, self._need(role, settings, bare))

    def _fits_alone(self, role: str, need: Need) -> bool:
        return any(self.fits({role: need}, rollout) for rollout in self.rollouts)

    def _candidate(self, role: str, settings: Settings, stages: Mapping[int, RoleMemory], need: Need) -> Candidate:
        key = self._key(role, settings)
        if key not in self._costs:
            self._costs[key] = self._cost(role, settings, need.layout, stages)
        return Candidate(role, settings, need, *self._costs[key])

    def _cost(
        self, role: str, settings: Settings, layout: ParallelLayout, stages: Mapping[int, RoleMemory]
    ) -> tuple[RoleCost, float]:
        """Seconds of (passes and updates, generation by the role itself)."""
        arch, hardware, generate_s = self.archs[role], self.hardware_of(role), 0.0
        # Transformers' classes count their own parameters: a model without a family has no other count.
        count = count_parameters if settings.engine == "megatron" else count_own_parameters
        counts = {stage: count(arch, layout, stage, value_head_of(settings) is not None) for stage in stages}
        cost, of = role_cost(role, arch, layout, settings, self.workload, hardware, counts, stages), hardware.calibration.of
        cost = cost.times(of(stage_of(role, "forward")), of(stage_of(role, "update")))
        if isinstance(settings, PolicyConfig) and self.config.rollout.engine == "megatron" and not self.workload.given:
            generate_s = megatron_s(arch, layout, settings, self.workload, hardware, counts) * of("generate")
        return cost, generate_s

    def _key(self, role: str, settings: Settings) -> tuple[object, ...]:
        anywhere = settings.model_copy(update={"ranks": ALL})
        return role, self.num_ranks(role), self.hardware_of(role).gpus_per_node, anywhere

    # ---------------------------------------------------------------------------------------------------------- combined

    def fits(self, needs: Mapping[str, Need], rollout: RolloutCandidate) -> bool:
        """True if these roles and the replicas fit together, with the margin. If some roles do not, more do not either."""
        hosts = self.timetable.ranks
        reserve = max(self._reserve(names, needs, rollout) for names in hosts) if self.machine.device == "cuda" else 0
        for names in hosts:
            # A role's fullest stage stands for all its ranks: too much where the fullest stages of two roles lie on different
            # ranks.
            here = [need for role, need in needs.items() if role in names]
            held = self._experience_of(names, needs)
            training = int(MARGIN * max((need.training for need in here), default=0)) + held
            pushed = max((need.pushed for need in here), default=0) + held
            at_rest = reserve + sum(need.resident for need in here)
            sampler = rollout.memory if ROLLOUT in names else None
            if fullest_moment(at_rest, training, pushed, sampler, self.config.rollout.sleep) > self.machine.hardware.usable_bytes:
                return False
        return True

    def _experience_of(self, names: Collection[str], needs: Mapping[str, Need]) -> int:
        if self.machine.device != "cuda":
            return 0
        replicas = {role: need.layout.dp for role, need in needs.items() if role in names}
        key = tuple(sorted(replicas.items()))
        if key not in self._experience:
            routes = route_bytes(self.config, self.archs.get("policy"))
            self._experience[key] = experience_bytes(self.config, self.machine.world_size, replicas, routes)
            self._experience[key] += feature_bytes(self.config, self.archs, replicas)
        return self._experience[key]

    def _reserve(self, names: Collection[str], needs: Mapping[str, Need], rollout: RolloutCandidate) -> int:
        # The reserve of a rank on which these roles live; the plan takes the largest of all ranks.
        of_roles = [(need.layout, self._has_experts(role)) for role, need in needs.items() if role in names]
        return reserve_bytes(of_roles, self.machine.world_size, (rollout.tp or 1) if ROLLOUT in names else 1)

    def _has_experts(self, role: str) -> bool:
        return self.archs[role].moe is not None

    def best(self) -> Choice | None:
        """The fastest candidates that fit together; None if none do."""
        if not self.rollouts or not all(self.candidates.values()):
            return None
        # The push of weights, about 1 % of a step, is ignored in the choice of the policy.
        fronts = {role: self._front(role, found) for role, found in self.candidates.items()}
        best: Choice | None = None
        for rollout in self.rollouts:
            limit = float("inf")  # what roles may take to win
            if best is not None:
                limit = best.total_s - (rollout.total_s if best.overlap is None else 0.0)
            fit = partial(self.fits, rollout=rollout)
            for roles in combinations(fronts, fit, self.timetable, limit):
                choice = self.choice(roles, rollout)
                if best is None or choice.total_s < best.total_s:
                    best = choice
        return best

    def _front(self, role: str, found: Sequence[Candidate]) -> list[Candidate]:
        """Candidates that no other undercuts in memory and time. found: the fastest first."""

        def communicators(layout: ParallelLayout) -> int:
            return layout_bytes(layout, self._has_experts(role)) if self.machine.device == "cuda" else 0

        # If roles take turns, their sum counts. Beside another role a slow pass may cost nothing, and a slow update much.
        times = None if self.timetable.takes_turns else [(one.generate_s, *one.cost.phases.values()) for one in found]
        return [found[index] for index in pareto([one.need for one in found], communicators, times)]

    def choice(self, roles: Mapping[str, Candidate], rollout: RolloutCandidate) -> Choice:
        """Combine these candidates with their plan, whether they fit or not."""
        policy, machine = roles["policy"], self.machine
        changes: dict[str, Any] = {role: one.settings for role, one in roles.items()}
        if rollout.tp is not None:
            changes[ROLLOUT] = self.config.rollout.model_copy(update={"tp": rollout.tp})
        layouts = {role: one.layout for role, one in roles.items()}
        config = with_sections(self.config, changes)
        plan = work_out(config, self.archs, layouts, machine.world_size, machine.device, machine.device_memory)
        loaded = max(stage.offloaded_weights for stage in plan.memory["policy"])
        ends = (self.placements["policy"], self.placements[ROLLOUT])
        pushing = push_s(policy.layout, rollout.memory, machine.hardware, loaded, ends)
        pushing *= machine.hardware.calibration.push_weights / config.rollout.push_every
        rest = machine.hardware.step_overhead_s + self.workload.samples * machine.hardware.sample_overhead_us * 1e-6
        if self.workload.given:  # nothing is decoded, scored or pushed
            plan, pushing, rest = replace(plan, is_supervised=True), 0.0, 0.0
        turns = self.workload.turns is not None and rollout.cost is not None
        return Choice(roles, rollout, pushing, plan, self.timetable, rest, turns)

    def _need(self, role: str, settings: Settings, stages: Collection[RoleMemory]) -> Need:
        return Need(
            layout_of(settings.parallel, self.num_ranks(role)),
            resident=max(one.resident for one in stages),
            training=max(one.active for one in stages),
            pushed=max(beside_sampler(one, role in self._trained) for one in stages) if role in self._beside_sampler else 0,
        )

    def _stages(self, role: str, settings: Settings) -> dict[int, RoleMemory]:
        """Stage -> memory, of the stages that may be the fullest."""
        key = self._key(role, settings)
        if key not in self._memory:
            arch, layout = self.archs[role], layout_of(settings.parallel, self.num_ranks(role))
            config = with_sections(self.config, {role: settings})
            self._memory[key] = memory_of_stages(config, role, arch, layout, fullest_stages(arch, layout), self.machine.device)
        return self._memory[key]

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
    """Stages that may be the fullest: the ends, and the first of those with the most layers."""
    every = list(range(layout.pp))
    if arch.moe is not None and arch.moe.dense_layers:  # layers differ
        return _first_of_each_kind(arch, layout)
    if not layout.layers_per_stage:
        return sorted({0, layout.pp - 1})
    sizes = [sum(layout.layers_per_stage[stage :: layout.pp]) for stage in every]
    # So uneven that an early stage with fewer layers may hold more, because it has more micro-batches in flight.
    if max(sizes) - min(sizes) > 1:
        return _first_of_each_kind(arch, layout)
    return sorted({0, sizes.index(max(sizes)), layout.pp - 1})


def _first_of_each_kind(arch: ModelArch, layout: ParallelLayout) -> list[int]:
    """Of stages with equal chunks the first has the most micro-batches in flight."""
    found: dict[tuple[object, ...], int] = {}
    for stage, chunks in enumerate(chunks_of_stages(arch, layout.pp, layout.vpp, layout.layers_per_stage)):
        found.setdefault((stage == 0, stage == layout.pp - 1, chunks), stage)
    return sorted(found.values())


def larger_worlds(machine: Machine) -> list[int]:
    """Numbers of GPUs by doubling, in whole nodes if more than one, so that layouts that are kept still divide them."""
    sizes, per_node = [machine.world_size], machine.hardware.gpus_per_node
    for _ in range(MOST_DOUBLINGS):
        twice = 2 * sizes[-1]
        sizes.append(twice if twice <= per_node else lcm(twice, per_node))
    return sizes[1:]


def gpus_needed(search: Search) -> int | None:
    """Smallest of `larger_worlds` on which some layout fits; None if none fits on the largest."""
    for world_size in larger_worlds(search.machine):
        machine = replace(search.machine, world_size=world_size)
        if Search(search.config, search.archs, machine, search.workload, search.tuned).best() is not None:
            return world_size
    return None
