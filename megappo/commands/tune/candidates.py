"""Candidates of a search (a role in one layout, vLLM in one size), a choice of one for every role, and the best one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from megappo.commands.plan.estimate import Plan
from megappo.commands.plan.memory import RolloutMemory
from megappo.commands.plan.phases import Phase, phases, tightest
from megappo.commands.tune.cost import RoleCost, Settings
from megappo.commands.tune.generation import PINNED_VLLM, GenerationCost, Overlap
from megappo.config.checks import Device
from megappo.config.role_sections import TrainableConfig, key_of_role
from megappo.models.implementation import Implementation
from megappo.parallel.layout import ParallelLayout, Placement, ranks_by_roles
from megappo.telemetry.hardware import Hardware

SCORES = "reward_model"  # its results are shared before any other role begins


class Work(NamedTuple):
    """A pass or the updates of a role in a step."""

    role: str
    phase: str
    """`forward` or `update`."""
    begin: float
    """Seconds after generation."""
    seconds: float

    @property
    def end(self) -> float:
        return self.begin + self.seconds


class Timetable:
    """Order of work in a step. placements: of every role and `rollout`. order: roles in the order of their passes."""

    def __init__(self, placements: Mapping[str, Placement], order: Sequence[str]) -> None:
        self.ranks = ranks_by_roles(placements)
        self._order = order
        # Ranks with the same roles are free at the same times: one number stands for all of them.
        self._places = {role: [at for at, names in enumerate(self.ranks) if role in names] for role in order}

    @property
    def takes_turns(self) -> bool:
        """True if no two roles ever work at the same time, so that the length of a step is a sum."""
        return len({tuple(places) for places in self._places.values()}) == 1

    def works(self, phases: Mapping[str, Mapping[str, float]]) -> list[Work]:
        """Passes and updates of a step, in order. phases: role -> seconds of `forward` and, if it trains, `update`."""
        done: list[Work] = []
        begin = 0.0
        for stage in self._stages(phases):
            free = [begin] * len(self.ranks)
            for role, phase, seconds in stage:
                work = Work(role, phase, max(free[at] for at in self._places[role]), seconds)
                for at in self._places[role]:
                    free[at] = work.end
                done.append(work)
            begin = max(free)  # an exchange over all ranks ends the stage
        return done

    def step_s(self, phases: Mapping[str, Mapping[str, float]]) -> float:
        """Seconds from the end of generation to the last update."""
        return max((work.end for work in self.works(phases)), default=0.0)

    def _stages(self, phases: Mapping[str, Mapping[str, float]]) -> Iterator[list[tuple[str, str, float]]]:
        forward = [(role, "forward", phases[role]["forward"]) for role in self._order if role in phases]
        yield [one for one in forward if one[0] == SCORES]
        yield [one for one in forward if one[0] != SCORES]
        updated = [role for role in self._order if "update" in phases.get(role, ())]
        updated.sort(key=lambda role: role == "policy")  # PPO's order: the critics first
        yield [(role, "update", phases[role]["update"]) for role in updated]


ROLLOUT = "rollout"


@dataclass(frozen=True)
class Machine:
    """Machine that a run is tuned for."""

    world_size: int
    hardware: Hardware
    implementation: Implementation = "local"
    """Implementation of the layers; each has its own rules for layouts."""
    vllm: tuple[int, int] = PINNED_VLLM
    """Release of vLLM."""

    @property
    def device(self) -> Device:
        return "cuda" if self.hardware.is_gpu() else "cpu"

    @property
    def device_memory(self) -> int | None:
        """Bytes of a GPU; None for CPU ranks, whose memory no plan counts."""
        return self.hardware.memory_bytes if self.hardware.is_gpu() else None


@dataclass(frozen=True)
class Need:
    """Bytes of one rank of a role, enough for every stage of its layout."""

    layout: ParallelLayout
    resident: int
    """Held while other roles work."""
    training: int
    """Added in stages 3 to 6; an estimate."""
    pushed: int
    """Added while vLLM's weights are awake, to write a checkpoint or score an evaluation."""


@dataclass(frozen=True)
class Candidate:
    """A role in one layout with its secondary choices."""

    role: str
    settings: Settings
    need: Need
    cost: RoleCost
    generate_s: float
    """Seconds of generation by the policy itself; 0 with vLLM."""

    @property
    def layout(self) -> ParallelLayout:
        return self.need.layout

    @property
    def total_s(self) -> float:
        return self.cost.total_s + self.generate_s

    @property
    def recompute(self) -> str:
        return self.settings.recompute if isinstance(self.settings, TrainableConfig) else "none"  # frozen: no backward pass

    def overrides(self) -> list[str]:
        """Every chosen key as `policy.parallel.tp=8`. A layers_per_stage of the user's file is reset."""
        parallel = self.settings.parallel
        split = "null" if not parallel.layers_per_stage else "[" + ",".join(map(str, parallel.layers_per_stage)) + "]"
        sizes = {key: getattr(parallel, key) for key in ("tp", "pp", "vpp", "cp", "ep", "etp")}
        chosen = {**sizes, "sequence_parallel": str(parallel.sequence_parallel).lower(), "layers_per_stage": split}
        lines = [f"{key_of_role(self.role)}.parallel.{key}={value}" for key, value in chosen.items()]
        lines.append(f"{key_of_role(self.role)}.micro_batch_tokens={self.settings.micro_batch_tokens}")
        if self.cost.is_trained:
            lines.append(f"{key_of_role(self.role)}.recompute={self.recompute}")
        return lines


@dataclass(frozen=True)
class RolloutCandidate:
    """vLLM with one tp; all fields are None if the policy's own model generates."""

    tp: int | None
    memory: RolloutMemory | None
    cost: GenerationCost | None
    evaluate_s: float | None = 0.0
    """Seconds of a step in which responses to evaluate are generated; None if unknown."""

    @property
    def total_s(self) -> float:
        return self.cost.total_s if self.cost is not None else 0.0

    def overrides(self) -> list[str]:
        return [f"rollout.tp={self.tp}"] if self.tp is not None else []


@dataclass(frozen=True)
class Choice:
    """A candidate for every role, and the replicas."""

    roles: Mapping[str, Candidate]
    rollout: RolloutCandidate
    push_s: float
    plan: Plan
    """The plan that `megappo plan` makes for them."""
    timetable: Timetable
    rest_s: float = 0.0
    """Seconds of what no model does: text, rules, packing."""
    knows_turns: bool = False
    """True if generation holds the turns of the environment, which a run has shown."""

    @property
    def generate_s(self) -> float:
        return self.rollout.total_s + self.roles["policy"].generate_s

    @property
    def training_s(self) -> float:
        """Seconds of passes and updates."""
        return self.timetable.step_s({role: one.cost.phases for role, one in self.roles.items()})

    @property
    def overlap(self) -> Overlap | None:
        """The two halves of an asynchronous run; None if generation and training take turns."""
        if self.plan.config.rollout.max_staleness is None or self.rollout.cost is None:
            return None
        sampling_s = self.rollout.cost.work_s + (self.rollout.evaluate_s or 0.0)
        cost = self.rollout.cost
        return Overlap(self.training_s + self.push_s + self.rest_s, sampling_s, cost.longest_s, cost.filled, cost.responses_s)

    @property
    def total_s(self) -> float:
        staleness, overlap = self.plan.config.rollout.max_staleness, self.overlap
        if staleness is None or overlap is None:
            return self.generate_s + self.training_s + self.push_s + self.rest_s + (self.rollout.evaluate_s or 0.0)
        return overlap.step_s(staleness)

    @property
    def peak(self) -> int:
        return self.plan.peak(self.plan.fullest_rank())

    def peak_of(self, role: str) -> int:
        """Peak bytes of any rank while this role works."""
        return tightest(self.plan)[role][0].total

    def fullest(self) -> tuple[Phase, int]:
        """(the phase in which a rank is fullest, the rank)."""
        rank = self.plan.fullest_rank()
        return max(phases(self.plan, rank), key=lambda phase: phase.total), rank


def pareto(
    needs: Sequence[Need],
    communicators: Callable[[ParallelLayout], int],
    times: Sequence[tuple[float, ...]] | None = None,
) -> list[int]:
    """Indices of the needs that no earlier one undercuts in every respect. communicators: bytes of a layout's own communicators.
    times: seconds that count as well; None if earlier needs are faster in every respect."""
    # Roles with the same layout share communicators. That is ignored: combining all layouts that could be shared takes too long.
    sizes = numpy.array(
        [
            (need.resident + communicators(need.layout), need.training, need.pushed, *(() if times is None else times[place]))
            for place, need in enumerate(needs)
        ],
        numpy.float64,  # which holds sizes up to 2 ** 53 bytes exactly
    )
    front, places = numpy.empty_like(sizes), []
    for place, own in enumerate(sizes):
        if not (front[: len(places)] <= own).all(axis=1).any():
            front[len(places)] = own
            places.append(place)
    return places


def combinations(
    fronts: Mapping[str, Sequence[Candidate]], fits: Callable[[Mapping[str, Need]], bool], timetable: Timetable, limit_s: float
) -> Iterator[dict[str, Candidate]]:
    """Yield combinations of one candidate per role that fit together, each faster than those before. fits: takes a subset of the
    roles; once false, more roles do not fit either. limit_s: bound on generation by a role, passes and updates."""
    best = limit_s
    roles = list(fronts)
    # Lower bound of a step: each role's fastest pass and fastest updates, even of different candidates.
    least = {
        role: {phase: min(one.cost.phases[phase] for one in front) for phase in front[0].cost.phases}
        for role, front in fronts.items()
    }
    generating = {role: min(one.generate_s for one in front) for role, front in fronts.items()}

    def extend(chosen: dict[str, Candidate]) -> Iterator[dict[str, Candidate]]:
        nonlocal best
        if len(chosen) == len(roles):
            best = _seconds(chosen, least, generating, timetable)
            yield chosen
            return
        role = roles[len(chosen)]
        for one in fronts[role]:
            more = {**chosen, role: one}
            # Cut this branch if even the fastest candidates of the open roles would not beat the best combination so far.
            if _seconds(more, least, generating, timetable) < best and fits({name: it.need for name, it in more.items()}):
                yield from extend(more)

    return extend({})


def _seconds(
    chosen: Mapping[str, Candidate],
    least: Mapping[str, Mapping[str, float]],
    generating: Mapping[str, float],
    timetable: Timetable,
) -> float:
    """Lower bound of the seconds of a step with these candidates."""
    phases = {role: chosen[role].cost.phases if role in chosen else least[role] for role in least}
    return timetable.step_s(phases) + sum(chosen[role].generate_s if role in chosen else generating[role] for role in least)
