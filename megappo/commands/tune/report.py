"""The ranking as text: for every role a table with reasons, then the chosen step by phase and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from megappo.commands.plan.phases import pass_name
from megappo.commands.tune.candidates import ROLLOUT, Candidate, Choice, Machine, RolloutCandidate
from megappo.commands.tune.cost import Workload
from megappo.commands.tune.links import Axis, span
from megappo.commands.tune.search import Search
from megappo.parallel.layout import ParallelLayout
from megappo.telemetry.hardware import Hardware
from megappo.telemetry.tables import GIB, figures, table

NOTABLE = 0.05  # share of a role's time that makes a part of it a reason
MOST_REASONS = 3
LEFT = ("layout", "recompute", "the chosen step", "why", "at work")  # columns of text


def report(search: Search, choice: Choice, top: int) -> str:
    blocks = [_assumptions(search.workload, search.machine)]
    for role in search.candidates:
        if role in search.tuned:
            blocks.append(role_lines(search, choice, role, top))
    if ROLLOUT in search.tuned and choice.rollout.tp is not None:
        blocks.append(rollout_lines(search, choice, top))
    blocks.append(step_lines(search, choice))
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _assumptions(workload: Workload, machine: Machine) -> list[str]:
    hardware = machine.hardware
    nodes = -(-machine.world_size // hardware.gpus_per_node)
    return [
        f"{machine.world_size} x {hardware.name} on {nodes} node{'s' if nodes > 1 else ''}: "
        f"{figures(hardware.usable_bytes / GIB)} GiB each, matrix products at {hardware.matmul_share:.0%} of the peak",
        f"a step: {workload.samples:,} samples of {workload.prompt_tokens:,.0f} + {workload.response_tokens:,.0f} tokens, "
        + _updates(workload),
        *([_windows(workload)] if workload.windows > 1 else []),
    ]


def _windows(workload: Workload) -> str:
    assert workload.whole is not None
    return (
        f"a response takes {workload.windows} steps: what earlier ones drew counts as its prompt, and critics learn from the "
        f"{1 / workload.windows:.0%} of responses that end, {workload.whole[0]:,.0f} + {workload.whole[1]:,.0f} tokens each"
    )


def _updates(workload: Workload) -> str:
    said = {role: f"{workload.updates(role)} updates of {workload.mini_batch(role):,}" for role in workload.schedules}
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return ", ".join(f"{text} ({role})" for role, text in said.items())


def role_lines(search: Search, choice: Choice, role: str, top: int) -> list[str]:
    """Table of the fastest layouts of a role that fit beside the other roles of `choice`."""
    found = search.beside(choice, role)
    trained = choice.roles[role].cost.is_trained
    generates = choice.roles[role].generate_s > 0
    header = [
        "",
        "layout",
        "tokens",
        *(["recompute"] if trained else []),
        "step s",
        *(["generate"] if generates else []),
        *(["forward", "update"] if trained else []),
        "bubble",
        "GiB",
        "why",
    ]
    rows = []
    for place, one in enumerate(found[:top], 1):
        phases = one.cost.phases
        rows.append(
            [
                str(place),
                layout_text(one.layout),
                f"{one.settings.micro_batch_tokens:,}",
                *([one.recompute] if trained else []),
                figures(one.total_s),
                *([figures(one.generate_s)] if generates else []),
                *([figures(phases["forward"]), figures(phases["update"])] if trained else []),
                f"{one.cost.share('bubble'):.0%}",
                figures(search.choice({**choice.roles, role: one}, choice.rollout).peak_of(role) / GIB),
                "; ".join(reasons(one, search)),
            ]
        )
    count = f"{len(found)} of {len({one.layout for one in search.candidates[role]})} layouts that fit alone fit beside the others"
    engine = "" if choice.roles[role].settings.engine == "megatron" else f" under {choice.roles[role].settings.engine}"
    return [f"{role}{engine}{_where(search, role)}: {count}", *table(header, rows, left=LEFT)]


def rollout_lines(search: Search, choice: Choice, top: int) -> list[str]:
    rows = []
    for place, one in enumerate(search.rollouts_beside(choice)[:top], 1):
        assert one.cost is not None and one.tp is not None
        rows.append(
            [
                str(place),
                f"tp{one.tp}",
                str(search.num_ranks(ROLLOUT) // one.tp),
                figures(one.total_s),
                figures(one.cost.prefill_s),
                figures(one.cost.decode_s),
                f"{one.cost.at_once} x {one.cost.waves}",
                figures(search.choice(choice.roles, one).peak / GIB),
                "; ".join(_rollout_reasons(one, search.hardware_of(ROLLOUT))),
            ]
        )
    return [
        f"rollout{_where(search, ROLLOUT)}",
        *table(["", "layout", "replicas", "step s", "prefill", "decode", "at once", "GiB", "why"], rows, left=LEFT),
    ]


def step_lines(search: Search, choice: Choice) -> list[str]:
    """Table of the chosen step (trainer/ppo.py, stages 2, 3, 4, 6 and 7), with the begin of roles that work at the same time, and
    the fullest rank."""
    rows, apart = [], not search.timetable.takes_turns
    for name, begin, seconds, role in _phases(choice):
        what = ""
        if role is not None:
            one = choice.roles[role]
            what = f"{layout_text(one.layout)}, {figures(choice.peak_of(role) / GIB)} GiB{_where(search, role)}"
        share = f"{seconds / choice.total_s:.0%}"
        rows.append([name, *([figures(begin)] if apart else []), figures(seconds), share, what])
    lines = table(["the chosen step", *(["from s"] if apart else []), "s", "share", "at work"], rows, left=LEFT)
    phase, rank = choice.fullest()
    room = search.machine.hardware.usable_bytes
    return [
        *lines,
        f"  together {figures(choice.total_s)} s; fullest is rank {rank} in `{phase.name}`: "
        f"{figures(phase.total / GIB)} of {figures(room / GIB)} GiB",
    ]


def _phases(choice: Choice) -> Iterator[tuple[str, float, float, str | None]]:
    """(name, begin, seconds, role) of each part of a step."""
    yield "generate", 0.0, choice.generate_s, None
    config = choice.plan.config
    for work in choice.timetable.works({role: one.cost.phases for role, one in choice.roles.items()}):
        name = pass_name(config, work.role) if work.phase == "forward" else f"{work.role} update"
        yield name, choice.generate_s + work.begin, work.seconds, work.role
    yield "push weights", choice.total_s - choice.push_s, choice.push_s, None


def _where(search: Search, name: str) -> str:
    placement = search.placements[name]
    return "" if placement.is_whole else f", on ranks {placement}"


def reasons(one: Candidate, search: Search) -> list[str]:
    """The largest parts of this layout's time that are not arithmetic, the largest first."""
    return [text for _, text in sorted(_shares(one, search.hardware_of(one.role)), key=lambda pair: -pair[0])][:MOST_REASONS] or [
        f"matrix products {one.cost.share('matmul') + one.cost.share('head') + one.cost.share('attention'):.0%}"
    ]


def _shares(one: Candidate, hardware: Hardware) -> Iterator[tuple[float, str]]:
    layout, cost = one.layout, one.cost
    collectives = "all-gather and reduce-scatter" if layout.sequence_parallel else "all-reduce"
    axes: list[tuple[str, Axis, str, str]] = [
        ("tp", "tp", f"tp {layout.tp}", collectives),
        ("cp", "cp", f"cp {layout.cp}", "all-to-all"),
        ("ep", "ep", f"ep {layout.ep}" + (f" etp {layout.etp}" if layout.etp > 1 else ""), "all-to-all"),
        ("pp", "pp", f"pp {layout.pp}" + (f" vpp {layout.vpp}" if layout.vpp > 1 else ""), "messages"),
        (
            "dp",
            "gradients",
            _shards(layout),
            "gradients and " + ("new" if one.settings.engine == "megatron" else "gathered") + " weights",
        ),
    ]
    for part, axis, name, what in axes:
        if (share := cost.share(part)) >= NOTABLE:
            crosses = " crosses nodes" if span(layout, axis, hardware.gpus_per_node).crosses_nodes else ""
            yield share, f"{name}{crosses}: {share:.0%} is {what}"
    if (share := cost.share("bubble")) >= NOTABLE:
        yield share, f"pp {layout.pp}: bubble {share:.0%} of {cost.num_micro_batches} micro-batches"
    if (share := cost.share("optimizer")) >= NOTABLE:
        where = " over the host link" if one.memory.offloaded_optimizer else ""
        yield share, f"{_shards(layout)}: {figures(one.memory.optimizer / GIB)} GiB optimizer, {share:.0%}{where}"
    if (share := cost.share("memory")) >= 2 * NOTABLE:
        whole = layout.tp > 1 and not layout.sequence_parallel
        yield share, f"elementwise kernels {share:.0%}" + (", no sequence parallel" if whole else "")
    if (share := cost.share("host")) >= 2 * NOTABLE:
        yield share, f"small micro-batches: {share:.0%} is launches"
    if (share := cost.share("offload")) >= 2 * NOTABLE:
        yield share, f"offload: {share:.0%}"


def _shards(layout: ParallelLayout) -> str:
    # Gradients are summed, and the optimizer is cut, over the ranks with the same weights.
    return f"dp {layout.dp}" + (f" x cp {layout.cp}" if layout.cp > 1 else "")


def _rollout_reasons(one: RolloutCandidate, hardware: Hardware) -> Iterator[str]:
    assert one.tp is not None and one.cost is not None
    if one.tp > hardware.gpus_per_node:
        yield f"tp {one.tp} crosses nodes"
    if one.cost.waves > 1:
        yield f"{one.cost.waves} waves of {one.cost.at_once} sequences"
    if one.cost.prefill_s >= 0.25 * one.total_s:
        yield f"prefill {one.cost.prefill_s / one.total_s:.0%}"


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
