"""Curves of several seeds: the mean as a line, the range as a band."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megappo.commands.compare.curves import Curve


@dataclass(frozen=True)
class Panel:
    """lines: label -> the curve of each seed. A label has its color by its place; one without curves has no line."""

    title: str
    lines: Mapping[str, Sequence[Curve]]


def draw_bands(rows: Sequence[Sequence[Panel]], target: Path, width: float = 9.0) -> None:
    """Write the panels as an SVG, `width` inches wide; one legend for all, below them."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 2.6 * len(rows) + 0.3), layout="constrained")
    handles = {}
    for row, of_row in zip(rows, figure.subplots(len(rows), len(rows[0]), squeeze=False, sharex=True)):
        for panel, axes in zip(row, of_row):
            for number, (label, curves) in enumerate(panel.lines.items()):
                if not curves:
                    continue
                steps = [step for step in sorted(curves[0]) if all(curve.get(step) is not None for curve in curves)]
                values = [[curve[step] or 0.0 for curve in curves] for step in steps]
                color = f"C{number}"
                axes.fill_between(steps, [min(one) for one in values], [max(one) for one in values], color=color, alpha=0.15, lw=0)
                (handles[label],) = axes.plot(steps, [sum(one) / len(one) for one in values], color=color, lw=1.4)
            axes.set_title(panel.title, fontsize=9)
            axes.tick_params(labelsize=7)
            axes.locator_params(nbins=4)  # each tick is half a KiB
            axes.grid(alpha=0.3)
            if row is rows[-1]:
                axes.set_xlabel("step", fontsize=8)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "megappo"}):
        figure.savefig(drawn := io.StringIO(), format="svg", metadata={"Date": None})
    # A tenth of a point is seen by nobody; matplotlib writes a millionth. Indentation is a fifth of the file.
    text = re.sub(r"(\d\.\d)\d+", r"\1", drawn.getvalue())
    target.write_text(re.sub(r"\n\s+", "\n", text), encoding="utf-8")
