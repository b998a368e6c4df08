"""Placements to try: all roles on all ranks, vLLM apart, the critic apart, and the critic with the frozen models apart.

The world is cut in half, between nodes if there are several: the model of the step time cannot tell apart placements that differ by
less than 15 %, as other shares do. An asynchronous run is tried with vLLM on a quarter, a half and three quarters, and colocated.
`search.py` searches each placement; `rank_placements` orders them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megappo.commands.tune.candidates import ROLLOUT, Choice, Machine
from megappo.commands.tune.search import Search
from megappo.config.keys import replaced
from megappo.config.layout_checks import placements_in_use, roles_in_use, world_problems
from megappo.config.rank_ranges import ranges_text
from megappo.config.role_sections import is_critic, key_of_role, section_of
from megappo.config.schema import TrainConfig
from megappo.parallel.layout import placement_of
from megappo.telemetry.tables import GIB, figures, table

ALONE_SHARE = 0.8  # rollout.memory_share of vLLM without models beside it; the rest is for the reserve and the headroom
COLOCATED = "colocated"
# Share of the step time: of timed placements one predicted to be 14 % shorter was the longer one (benchmarks/bench_placements.py).
UNSURE = 0.15


class Placing(NamedTuple):
    """Keys of one placement of roles on ranks."""

    name: str
    """Name that users read, such as `critic on 4-7`."""
    changes: Mapping[str, str | float | tuple[()] | None]
    """Key -> value: `critic.ranks` and what follows from it, such as an empty `critic.offload`."""

    def applied(self, config: TrainConfig) -> TrainConfig:
        for key, value in self.changes.items():
            config = replaced(config, key.split("."), value)
        return config

    def overrides(self) -> list[str]:
        words = {(): "[]", None: "null"}
        return [f"{key}={words.get(value, value)}" for key, value in self.changes.items()]


class Placed(NamedTuple):
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
    per_node, world_size = machine.hardware.gpus_per_node, machine.world_size
    unit = per_node if world_size > per_node else 1
    half = world_size // unit // 2 * unit
    if config.rollout.max_staleness is not None:
        yield Placing(COLOCATED, {"rollout.max_staleness": None})
        quarters = {round(share * world_size / unit / 4) * unit for share in (1, 2, 3)}
        yield from (_rollout_on_last(config, world_size, size) for size in sorted(quarters - {0, world_size}))
        return
    yield Placing(COLOCATED, {})
    if half == 0:
        return
    first, last = ranges_text(range(world_size - half)), ranges_text(range(world_size - half, world_size))
    roles, by_vllm = list(roles_in_use(config)), config.rollout.engine == "vllm"
    if by_vllm:
        yield _rollout_on_last(config, world_size, half)
    critics = [role for role in roles if is_critic(role)]
    frozen = [role for role in roles if role != "policy" and role not in critics]
    for apart in dict.fromkeys(one for one in ((*critics,), (*critics, *frozen)) if one):
        name = f"{' and '.join(apart).replace('_', ' ')} on {last}"
        ranks = {f"{key_of_role(role)}.ranks": last if role in apart else first for role in roles}
        if by_vllm:
            yield Placing(name, ranks)
        # Fewer ranks generate, and the critics have no vLLM beside it.
        yield Placing(f"{name}, rollout on {first}", {**ranks, "rollout.ranks": first})


def _rollout_on_last(config: TrainConfig, world_size: int, size: int) -> Placing:
    """Place vLLM on the last `size` ranks and all roles on the others."""
    first, last = ranges_text(range(world_size - size)), ranges_text(range(world_size - size, world_size))
    ranks = {f"{key_of_role(role)}.ranks": first for role in roles_in_use(config)}
    return Placing(f"rollout on {last}", {**ranks, "rollout.ranks": last})


def _with_consequences(placing: Placing, config: TrainConfig, world_size: int) -> Placing:
    """Turn off offload and sleep where no other role needs the room, and give vLLM a larger share where it is alone."""
    where = {name: placement_of(ranks, world_size) for name, ranks in placements_in_use(placing.applied(config)).items()}
    alone = {name for name, one in where.items() if not any(one.overlaps(where[other]) for other in where if other != name)}
    changes, rollout = dict(placing.changes), config.rollout
    changes |= {
        f"{key_of_role(role)}.offload": () for role in roles_in_use(config) if role in alone and section_of(config, role).offload
    }
    if rollout.engine == "vllm" and ROLLOUT in alone:
        changes |= {"rollout.sleep": "none"} if rollout.sleep != "none" else {}
        if rollout.kv_cache_gib is None and rollout.memory_share < ALONE_SHARE:
            changes["rollout.memory_share"] = ALONE_SHARE
    return Placing(placing.name, changes)


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
