"""Picture of `megappo compare`: a panel for each metric, a line for each run. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.commands.compare.curves import Curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_DOTS = 40  # values of a curve; more dots would hide its line
COLUMNS = 3
_PANEL_INCHES = (4.6, 2.7)


def draw_curves(curves: Mapping[str, Mapping[str, Curve]], target: Path, title: str = "") -> None:
    """Write the picture of metric -> run -> curve. Metrics without a finite value have no panel."""
    import matplotlib

    # Text stays text in an SVG: a quarter of the size. The salt makes two drawings of the same curves equal.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "megappo"}):
        metadata = {"Date": None} if target.suffix == ".svg" else None
        figure_of(curves, title).savefig(target, dpi=110, metadata=metadata)


def figure_of(curves: Mapping[str, Mapping[str, Curve]], title: str = "") -> Figure:
    """Draw the panels in rows of COLUMNS, with one legend for all. Lines are broken where a value was not finite."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawn = {metric: runs for metric, runs in curves.items() if any(_has_values(curve) for curve in runs.values())}
    columns = max(1, min(COLUMNS, len(drawn)))
    rows = max(1, math.ceil(len(drawn) / columns))
    figure = Figure(figsize=(columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1] + 0.4), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    lines = {}
    for (metric, runs), axes in zip(drawn.items(), panels):  # in this order, or zip takes a panel more than it needs
        for number, (name, curve) in enumerate(runs.items()):
            values = [math.nan if value is None else value for value in curve.values()]
            # Later lines are dashed, so that equal curves show that there are two.
            look = {
                "ls": "-" if number == 0 else "--",
                "marker": "." if len(curve) <= MOST_DOTS else "",
                "color": f"C{number % 10}",
            }
            (lines[name],) = axes.plot(list(curve), values, lw=1.3, ms=4, **look)
        axes.set_title(metric, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.set_xlabel("step", fontsize=7, loc="right")
        axes.grid(alpha=0.3)
    for axes in panels:
        axes.set_axis_off()
    figure.suptitle(title, fontsize=11)
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=min(4, max(1, len(lines))), fontsize=8, frameon=False
    )
    return figure


def _has_values(curve: Curve) -> bool:
    return any(value is not None for value in curve.values())
