"""The ranking as text: for every role a table with reasons, then the chosen step by phase and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType

from megappo.commands.tune.candidates import ROLLOUT, Candidate, Choice, Machine
from megappo.commands.tune.cost import Pictures, Workload
from megappo.commands.tune.generation import simulated
from megappo.commands.tune.parts import parts_of
from megappo.commands.tune.search import Search
from megappo.commands.tune.work import Axis, span
from megappo.parallel.layout import ParallelLayout
from megappo.telemetry.hardware import Hardware
from megappo.telemetry.tables import GIB, figures, table_of

NOTABLE = 0.05  # share of a role's time that makes a part of it a reason
MOST_REASONS = 3
ARITHMETIC = ("matmul", "head", "attention", "tower")
LEFT = ("layout", "recompute", "why", "limited by", "at work")  # columns of text


def report(search: Search, choice: Choice, top: int) -> str:
    blocks = [assumptions(search.workload, search.machine)]
    for role in search.candidates:
        if role in search.tuned:
            blocks.append(role_lines(search, choice, role, top))
    if ROLLOUT in search.tuned and choice.rollout.tp is not None:
        blocks.append(rollout_lines(search, choice, top))
    blocks.append(step_lines(search, choice))
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def assumptions(workload: Workload, machine: Machine) -> list[str]:
    hardware = machine.hardware
    nodes = -(-machine.world_size // hardware.gpus_per_node)
    calibrated = ", ".join(f"{stage} x {figures(factor)}" for stage, factor in hardware.calibration.named().items())
    return [
        f"{machine.world_size} x {hardware.name} on {nodes} node{'s' if nodes > 1 else ''}: "
        f"{figures(hardware.usable_bytes / GIB)} GiB each, matrix products at {hardware.matmul_share:.0%} of the peak",
        *([f"calibrated by a run: {calibrated}"] if calibrated else []),
        f"a step: {workload.samples:,} samples of {_lengths(workload)} tokens, " + _updates(workload),
        *([_windows(workload)] if workload.windows > 1 else []),
        *([_pictures(workload.pictures)] if workload.pictures is not None else []),
    ]


def _lengths(workload: Workload) -> str:
    if workload.given:
        return f"{workload.length:,.0f}"
    return f"{workload.prompt_tokens:,.0f} + {workload.response_tokens:,.0f}"


def _windows(workload: Workload) -> str:
    assert workload.whole is not None
    return (
        f"a response takes {workload.windows} steps: what earlier ones drew counts as its prompt, and critics learn from the "
        f"{1 / workload.windows:.0%} of responses that end, {workload.whole[0]:,.0f} + {workload.whole[1]:,.0f} tokens each"
    )


def _pictures(pictures: Pictures) -> str:
    return (
        f"images: {pictures.tokens:,.0f} tokens in each of {pictures.prompts:,} prompts; a frozen tower computes them once a step"
    )


def _updates(workload: Workload) -> str:
    said = {role: f"{workload.updates(role)} updates of {workload.mini_batch(role):,}" for role in workload.schedules}
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return ", ".join(f"{text} ({role})" for role, text in said.items())


def role_lines(search: Search, choice: Choice, role: str, top: int) -> list[str]:
    """Table of the fastest layouts of a role that fit beside the other roles of `choice`."""
    found = search.beside(choice, role)
    rows = [
        {
            "": str(place),
            "layout": layout_text(one.layout),
            "tokens": f"{one.settings.micro_batch_tokens:,}",
            **({"recompute": one.recompute} if one.cost.is_trained else {}),
            "step s": figures(one.total_s),
            **({"generate": figures(one.generate_s)} if one.generate_s > 0 else {}),
            **({phase: figures(seconds) for phase, seconds in one.cost.phases.items()} if one.cost.is_trained else {}),
            "bubble": f"{one.cost.share('bubble'):.0%}",
            "GiB": figures(search.choice({**choice.roles, role: one}, choice.rollout).peak_of(role) / GIB),
            "why": reasons(one, search.hardware_of(role)),
        }
        for place, one in enumerate(found[:top], 1)
    ]
    count = f"{len(found)} of {len({one.layout for one in search.candidates[role]})} layouts that fit alone fit beside the others"
    engine = "" if choice.roles[role].settings.engine == "megatron" else f" under {choice.roles[role].settings.engine}"
    return [f"{role}{engine}{_where(search, role)}: {count}", *table_of(rows, left=LEFT)]


def rollout_lines(search: Search, choice: Choice, top: int) -> list[str]:
    rows = []
    for place, one in enumerate(search.rollouts_beside(choice)[:top], 1):
        assert one.cost is not None and one.tp is not None
        row = {
            "": str(place),
            "layout": f"tp{one.tp}",
            "replicas": str(search.num_ranks(ROLLOUT) // one.tp),
            "step s": figures(one.total_s),
            "prefill": figures(one.cost.prefill_s),
            "decode": figures(one.cost.decode_s),
            "at once": f"{one.cost.at_once} x {one.cost.waves}",
            "GiB": figures(search.choice(choice.roles, one).peak / GIB),
        }
        rows.append(row | ({"why": "tp crosses nodes"} if one.tp > search.hardware_of(ROLLOUT).gpus_per_node else {}))
    return [f"rollout{_where(search, ROLLOUT)}", *table_of(rows, left=LEFT)]


def step_lines(
    search: Search, choice: Choice, title: str = "the chosen step", factors: Mapping[str, float] = MappingProxyType({})
) -> list[str]:
    """Table of a step part by part, with the begin of roles that work at the same time, and the fullest rank. factors: stage of
    `timing/` -> seconds that a run took by those predicted."""
    parts, rows = parts_of(choice), []
    for part in parts:
        begin = {} if search.timetable.takes_turns and choice.overlap is None else {"from s": figures(part.begin)}
        if part.seconds is None:
            rows.append({title: part.name, **dict.fromkeys(begin, ""), "s": "unknown"})
            continue
        row = {title: part.name, **begin, "s": figures(part.seconds), "share": f"{part.seconds / choice.total_s:.0%}"}
        row["limited by"] = f"{part.limit} {part.share:.0%}" if part.limit else ""
        if part.timing in factors:
            row["calibrated s"] = figures(part.seconds * factors[part.timing])
        if part.role is not None:
            one, peak = choice.roles[part.role], choice.peak_of(part.role)
            row["at work"] = f"{layout_text(one.layout)}, {figures(peak / GIB)} GiB{_where(search, part.role)}"
        rows.append(row)
    but = "" if all(part.seconds is not None for part in parts) else " and what is unknown"
    (phase, rank), room = choice.fullest(), search.machine.hardware.usable_bytes
    fits = "" if choice.peak <= room else ", which does not fit"
    fullest = f"fullest is rank {rank} in `{phase.name}`: {figures(phase.total / GIB)} of {figures(room / GIB)} GiB{fits}"
    together = f"  together {figures(choice.total_s)} s{but}; {fullest}"
    return [*table_of(rows, left=(*LEFT, title)), together, *overlap_lines(choice)]


def overlap_lines(choice: Choice) -> list[str]:
    """Say what bounds the step of an asynchronous run, and the smallest `rollout.max_staleness` that reaches its floor."""
    if (overlap := choice.overlap) is None:
        return []
    training, sampling, longest = map(figures, overlap[:3])
    config, cost, step = choice.plan.config.rollout, choice.rollout.cost, choice.total_s
    assert config.max_staleness is not None and cost is not None
    _, age = simulated(config.max_staleness, overlap.training_s, cost.filled, cost.responses_s)
    return [
        f"  of a step training waits {figures(step - overlap.training_s)} s and the ranks that sample "
        f"{figures(max(0.0, step - overlap.sampling_s))} s; responses begin with weights {age:.2g} versions old on average",
        f"  asynchronous: the largest of training and push {training} s, sampling {sampling} s, and (longest response {longest} s, "
        f"training and push) / (max_staleness + 1), longer where responses wait for places that other steps have; "
        f"rollout.max_staleness={overlap.enough()} reaches {figures(overlap.floor_s)} s",
    ]


def _where(search: Search, name: str) -> str:
    placement = search.placements[name]
    return "" if placement.is_whole else f", on ranks {placement}"


def reasons(one: Candidate, hardware: Hardware) -> str:
    """The largest parts of this layout's time that are not arithmetic, the largest first."""
    shares = {part: one.cost.share(part) for part in one.cost.parts if part not in ARITHMETIC}
    largest = sorted((part for part in shares if shares[part] >= NOTABLE), key=lambda part: -shares[part])[:MOST_REASONS]
    return ", ".join(f"{_part_text(part, one.layout, hardware)} {shares[part]:.0%}" for part in largest)


def _part_text(part: str, layout: ParallelLayout, hardware: Hardware) -> str:
    axes: dict[str, Axis] = {"tp": "tp", "cp": "cp", "ep": "ep", "pp": "pp", "dp": "gradients"}
    if part not in axes:
        return {"memory": "elementwise", "host": "launches"}.get(part, part)
    return f"{part} across nodes" if span(layout, axes[part], hardware.gpus_per_node).crosses_nodes else part


def layout_text(layout: ParallelLayout) -> str:
    """Layout as `str`, with long splits shortened: `tp8 pp16 dp2 split 7, 14 x 8, 7`."""
    if not layout.layers_per_stage:
        return str(layout)
    runs = [(layers, len(list(group))) for layers, group in groupby(layout.layers_per_stage)]
    split = ", ".join(f"{count} x {layers}" if count > 1 else str(layers) for layers, count in runs)
    return f"{replace(layout, layers_per_stage=())} split {split}"


def name_of(one: Candidate) -> str:
    """Layout and secondary choices in one line: `tp4 pp2 dp8 sp, 4096 tokens, recompute full`."""
    recompute = f", recompute {one.recompute}" if one.recompute != "none" else ""
    return f"{layout_text(one.layout)}, {one.settings.micro_batch_tokens} tokens{recompute}"


def overrides_of(search: Search, choice: Choice) -> list[str]:
    """`key=value` lines of the tuned roles, the number of ranks, and the placement if it was searched."""
    lines = [f"run.num_ranks={search.machine.world_size}", *search.placing]
    for role, one in choice.roles.items():
        lines += one.overrides() if role in search.tuned else []
    return lines + (choice.rollout.overrides() if ROLLOUT in search.tuned else [])
