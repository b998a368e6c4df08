"""The ranking of placements as text: a table, and a line why the first of them is the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megappo.commands.tune.candidates import Choice
from megappo.commands.tune.placing import COLOCATED, Placed
from megappo.commands.tune.rank_use import idle_share, rank_uses
from megappo.commands.tune.tables import aligned
from megappo.telemetry.tables import GIB, figures

UNSURE = 0.15  # of a step: of timed placements one predicted to be 14 % shorter was the longer one (docs/tuning.md)
HEADER = ["", "placement", "step s", "generate", "passes", "updates", "push", "GiB", "idle", "why"]


def placement_lines(ranked: Sequence[Placed], top: int) -> list[str]:
    """Table of the fastest placements, and the advice. ranked: the fastest first."""
    fitting = [one for one in ranked if one.choice is not None]
    rows = []
    for place, one in enumerate(fitting[:top], 1):
        choice = one.choice
        assert choice is not None
        passes, updates = stage_seconds(choice)
        seconds = map(figures, (choice.total_s, choice.generate_s, passes, updates, choice.push_s))
        peak = figures(choice.peak / GIB)
        rows.append([str(place), one.placing.name, *seconds, peak, f"{idle_share(choice):.0%}", reason(choice)])
    table = aligned(HEADER, rows, left=("placement",))
    return [f"placements: in {len(fitting)} of {len(ranked)} the models fit", *table, f"  {advice(ranked)}"]


def stage_seconds(choice: Choice) -> tuple[float, float]:
    """Seconds of all passes without gradients, and of all updates, by the clock."""
    works = choice.timetable.works({role: one.cost.phases for role, one in choice.roles.items()})
    passes = max(work.end for work in works if work.phase == "forward")
    return passes, max(work.end for work in works) - passes


def reason(choice: Choice) -> str:
    """Time saved by roles that work together, and the ranks that wait most."""
    saved = overlap_s(choice)
    together = [f"roles overlap for {figures(saved)} s"] if saved > 0.005 * choice.total_s else []
    idlest = max(rank_uses(choice), key=lambda use: use.idle)
    return "; ".join(together + ([str(idlest)] if idlest.idle >= 0.005 else []))


def overlap_s(choice: Choice) -> float:
    """Seconds by which passes and updates would be longer one after the other."""
    return max(0.0, sum(one.cost.total_s for one in choice.roles.values()) - sum(stage_seconds(choice)))


def advice(ranked: Sequence[Placed]) -> str:
    """One line on the fastest placement against roles on all ranks. ranked: the fastest first, with a choice."""
    first = ranked[0]
    together = next((one.choice for one in ranked if one.placing.name == COLOCATED), None)
    assert first.choice is not None
    if first.placing.name == COLOCATED:
        second = next((one for one in ranked[1:] if one.choice is not None), None)
        if second is None or second.choice is None:
            return f"{COLOCATED}: no placement of roles on ranks of their own fits"
        slower = second.choice.total_s / first.choice.total_s - 1
        return f"{COLOCATED}: {second.placing.name} would take {slower:.0%} longer; {_memory(second.choice, first.choice)}"
    if together is None:
        return f"{first.placing.name}: {COLOCATED} the models do not fit"
    saved = together.total_s - first.choice.total_s
    less = f"{figures(saved)} s ({saved / together.total_s:.0%}) less than {COLOCATED}"
    less += ", which the model cannot tell apart" if saved < UNSURE * together.total_s else ""
    return f"{first.placing.name}: {less}; {_memory(first.choice, together)}"


def _memory(apart: Choice, together: Choice) -> str:
    """Memory of the fullest rank with roles apart, against all of them on all ranks."""
    freed = (together.peak - apart.peak) / GIB
    return f"its fullest rank holds {figures(abs(freed))} GiB {'less' if freed >= 0 else 'more'}"


def placement_facts(ranked: Sequence[Placed]) -> list[dict[str, Any]]:
    """The ranking for other programs, in seconds and bytes."""
    return [
        {
            "placement": one.placing.name,
            "overrides": one.placing.overrides(),
            "fits": one.choice is not None,
            **({} if one.choice is None else _measures(one.choice)),
        }
        for one in ranked
    ]


def _measures(choice: Choice) -> dict[str, Any]:
    return {
        "step_seconds": choice.total_s,
        "peak_bytes": choice.peak,
        "idle": {",".join(use.names): use.idle for use in rank_uses(choice)},
    }
