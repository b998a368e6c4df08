"""Lines of a plan on host work, and the warning if it takes much of a step."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.commands.plan.estimate import Plan
from megappo.commands.plan.host import HostWork
from megappo.commands.plan.least_step import hardware_of_plan, least_step_s
from megappo.telemetry.tables import GIB, MIB, figures, table

MOST_SHARE = 0.05  # of a step, for host work


def host_lines(plan: Plan) -> list[str]:
    """Host memory and seconds by phase of the rank that needs most."""
    work = HostWork(plan)
    rank = work.fullest_rank
    phases = work.phases(rank)
    fullest = max(phases, key=lambda phase: phase.bytes)
    seconds = sum(phase.seconds for phase in phases)
    size, size_name = (GIB, "GiB") if fullest.bytes >= GIB else (MIB, "MiB")
    time, time_name = (1.0, "s") if seconds >= 1 else (1e-3, "ms")
    rows = [
        [phase.name, f"{phase.bytes / size:,.2f}", f"{phase.seconds / time:,.2f}", "most memory" if phase == fullest else ""]
        for phase in phases
    ]
    total = plan.step.samples * plan.step.max_sequence_tokens
    return [
        f"host work of rank {rank} by phase",
        *table(["phase", size_name, time_name, ""], rows, left=1),
        f"  {figures(seconds / time)} {time_name} of one core a step; of {total:,} tokens at most {work.own_tokens:,} are its own",
        "  an estimate for experience alone, every sequence at its longest; rules that compute come on top",
    ]


def host_warnings(plan: Plan) -> Iterator[str]:
    """A line if host work takes more than MOST_SHARE of the least time of a step."""
    work = HostWork(plan)
    rank = work.fullest_rank
    phases = work.phases(rank)
    seconds, hardware = sum(phase.seconds for phase in phases), hardware_of_plan(plan)
    step_s = least_step_s(plan, hardware)
    share = seconds / (seconds + step_s)
    if share <= MOST_SHARE:
        return
    longest = max(phases, key=lambda phase: phase.seconds)
    yield (
        f"host work of rank {rank} takes {figures(seconds)} s a step, {figures(longest.seconds)} of them in {longest.name}: up to "
        f"{100 * share:.0f} % of a step, whose arithmetic and decoding take at least {figures(step_s)} s (profile {hardware.name})"
    )
