"""Placements to try: all roles on all ranks, vLLM apart, the critic apart, the critic with the frozen models apart, and both apart.

The world is cut once, or twice to give policy, critic and vLLM ranks of their own, at a quarter, a half and three quarters; between
nodes if there are several. `search.py` searches each placement; `rank_placements` orders them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from megappo.commands.tune.candidates import ROLLOUT, Choice, Machine
from megappo.commands.tune.search import Search
from megappo.config.keys import replaced
from megappo.config.layout_checks import placements_in_use, roles_in_use, world_problems
from megappo.config.rank_ranges import ranges_text
from megappo.config.role_sections import is_critic, key_of_role, section_of
from megappo.config.schema import TrainConfig
from megappo.parallel.layout import Placement, placement_of
from megappo.telemetry.tables import GIB, figures, table

QUARTERS = (1, 2, 3)  # of the nodes, for the roles that are set apart
ALONE_SHARE = 0.8  # of the memory, for vLLM without models beside it; the rest is for the reserve and the headroom
COLOCATED = "colocated"
UNSURE = 0.15  # of a step: of timed placements one predicted to be 14 % shorter was the longer one (benchmarks/bench_placements.py)


@dataclass(frozen=True)
class Placing:
    """Keys of one placement of roles on ranks."""

    name: str
    """Its name for users."""
    changes: Mapping[str, str | float | tuple[()]]
    """Key -> value: `critic.ranks` and what follows from it, such as an empty `critic.offload`."""

    def applied(self, config: TrainConfig) -> TrainConfig:
        for key, value in self.changes.items():
            config = replaced(config, key.split("."), value)
        return config

    def overrides(self) -> list[str]:
        return [f"{key}={'[]' if value == () else value}" for key, value in self.changes.items()]


@dataclass(frozen=True)
class Placed:
    """A placement with its search."""

    placing: Placing
    search: Search
    choice: Choice | None
    """The fastest run in it; None if nothing fits."""


def rank_placements(search: Search, neutral: TrainConfig) -> list[Placed]:
    """Search every placement; the fastest first, those in which nothing fits last. search: colocated. neutral: its configuration
    without the open layouts, which need not fit another placement."""
    found = []
    for placing in placings(neutral, search.machine):
        placed = search.placed(placing.applied(search.config), placing.overrides())
        found.append(Placed(placing, placed, placed.best()))
    return sorted(found, key=lambda one: float("inf") if one.choice is None else one.choice.total_s)


def placings(config: TrainConfig, machine: Machine) -> Iterator[Placing]:
    """Yield the placements that the rules of a run allow, colocated first. config: has all roles on all ranks."""
    for placing in _proposed(config, machine):
        placing = _with_consequences(placing, config, machine.world_size)
        if next(world_problems(placing.applied(config), machine.world_size), None) is None:
            yield placing


def _proposed(config: TrainConfig, machine: Machine) -> Iterator[Placing]:
    yield Placing(COLOCATED, {})
    roles, world_size = list(roles_in_use(config)), machine.world_size
    by_vllm, frozen = config.rollout.engine == "vllm", [role for role in roles if role != "policy" and not is_critic(role)]
    critics = [role for role in roles if is_critic(role)]
    groups = [one for one in dict.fromkeys(((*critics,), (*critics, *frozen))) if one]
    for size in _sizes(machine):
        first, last = ranges_text(range(world_size - size)), ranges_text(range(world_size - size, world_size))
        if by_vllm:
            yield Placing(f"rollout on {last}", {**{f"{key_of_role(role)}.ranks": first for role in roles}, "rollout.ranks": last})
        for apart in groups:
            name, ranks = _apart(roles, apart, first, last)
            if by_vllm:
                yield Placing(name, ranks)
            # Fewer ranks generate, and the critics have no vLLM beside it.
            yield Placing(f"{name}, rollout on {first}", {**ranks, "rollout.ranks": first})
    for sizes in _pairs_of_sizes(machine) if by_vllm else []:
        cuts = world_size - sum(sizes), world_size - sizes[1]
        first, second, last = map(ranges_text, (range(cuts[0]), range(*cuts), range(cuts[1], world_size)))
        for apart in groups:
            name, ranks = _apart(roles, apart, first, second)
            yield Placing(f"{name}, rollout on {last}", {**ranks, "rollout.ranks": last})


def _apart(roles: Sequence[str], apart: Sequence[str], first: str, second: str) -> tuple[str, dict[str, str]]:
    """Name and keys of a placement with the roles `apart` on the second ranks and the others on the first."""
    name = f"{' and '.join(apart).replace('_', ' ')} on {second}"
    return name, {f"{key_of_role(role)}.ranks": second if role in apart else first for role in roles}


def _pairs_of_sizes(machine: Machine) -> list[tuple[int, int]]:
    """Numbers of ranks for (the critics, vLLM) that leave some for the policy; at most three pairs."""
    sizes = _sizes(machine)
    return [pair for pair in product(sizes, sizes) if sum(pair) < machine.world_size]


def _sizes(machine: Machine) -> list[int]:
    per_node = machine.hardware.gpus_per_node
    unit = per_node if machine.world_size > per_node else 1
    nodes = machine.world_size // unit
    return sorted({nodes * quarter // 4 * unit for quarter in QUARTERS} - {0})


def _with_consequences(placing: Placing, config: TrainConfig, world_size: int) -> Placing:
    """Turn off offload and sleep where no other role needs the room, and give vLLM a larger share where it is alone."""
    where = {name: placement_of(ranks, world_size) for name, ranks in placements_in_use(placing.applied(config)).items()}
    changes = dict(placing.changes)
    for role in roles_in_use(config):
        if _is_alone(role, where):
            changes |= {f"{key_of_role(role)}.offload": ()} if section_of(config, role).offload else {}
    rollout = config.rollout
    if rollout.engine == "vllm" and _is_alone(ROLLOUT, where):
        changes |= {"rollout.sleep": "none"} if rollout.sleep != "none" else {}
        if rollout.kv_cache_gib is None and rollout.memory_share < ALONE_SHARE:
            changes["rollout.memory_share"] = ALONE_SHARE
    return Placing(placing.name, changes)


def _is_alone(name: str, where: Mapping[str, Placement]) -> bool:
    return not any(placement.overlaps(where[name]) for other, placement in where.items() if other != name)


# ------------------------------------------------------------------------------------------------------------------ report


def placement_lines(ranked: Sequence[Placed], top: int) -> list[str]:
    """Table of the fastest placements, and the advice. ranked: the fastest first."""
    fitting = [(one.placing.name, one.choice) for one in ranked if one.choice is not None]
    rows = []
    for place, (name, choice) in enumerate(fitting[:top], 1):
        passes, updates = stage_seconds(choice)
        seconds = map(figures, (choice.total_s, choice.generate_s, passes, updates, choice.push_s, choice.peak / GIB))
        rows.append([str(place), name, *seconds])
    lines = table(["", "placement", "step s", "generate", "passes", "updates", "push", "GiB"], rows, left=("placement",))
    return [f"placements: in {len(fitting)} of {len(ranked)} the models fit", *lines, f"  {advice(ranked)}"]


def stage_seconds(choice: Choice) -> tuple[float, float]:
    """Wall-clock seconds of (all passes without gradients, all updates)."""
    works = choice.timetable.works({role: one.cost.phases for role, one in choice.roles.items()})
    passes = max(work.end for work in works if work.phase == "forward")
    return passes, max(work.end for work in works) - passes


def advice(ranked: Sequence[Placed]) -> str:
    """One line on the fastest placement against roles on all ranks. ranked: the fastest first, with a choice."""
    seconds = {one.placing.name: one.choice.total_s for one in ranked if one.choice is not None}
    (first, least), *others = seconds.items()
    if first == COLOCATED and not others:
        return f"{first}: no placement of roles on ranks of their own fits"
    if first == COLOCATED:
        return f"{first}: {others[0][0]} would take {others[0][1] / least - 1:.0%} longer"
    if COLOCATED not in seconds:
        return f"{first}: {COLOCATED} the models do not fit"
    saved = seconds[COLOCATED] - least
    unsure = ", which the model cannot tell apart" if saved < UNSURE * seconds[COLOCATED] else ""
    return f"{first}: {figures(saved)} s ({saved / seconds[COLOCATED]:.0%}) less than {COLOCATED}{unsure}"


def placement_facts(ranked: Sequence[Placed]) -> list[dict[str, Any]]:
    """The ranking as plain data, in seconds and bytes."""
    return [
        {
            "placement": one.placing.name,
            "overrides": one.placing.overrides(),
            "fits": one.choice is not None,
            **({} if one.choice is None else {"step_seconds": one.choice.total_s, "peak_bytes": one.choice.peak}),
        }
        for one in ranked
    ]
