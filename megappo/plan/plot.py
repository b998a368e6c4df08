"""A picture of a plan: the rank grid of every role, and the pipeline of every trained role with its bubble. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megappo.parallel.layout import ParallelLayout
from megappo.plan.estimate import Plan
from megappo.plan.timeline import timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAINED = ("policy", "critic")
# Cells and micro-batches beyond these are too small to read; the title says what is left out.
MOST_RANKS, MOST_MICRO_BATCHES = 128, 24
_FORWARD, _BACKWARD = "#4c72b0", "#dd8452"


def check_plot(path: str) -> Path:
    """Where the picture goes. ValueError where it cannot be drawn or written there."""
    target = Path(path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot {path}: matplotlib is not installed; pip install 'megappo[plot]'")
    if target.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {path}: the name must end in .png, .svg or .pdf")
    if not target.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no directory {target.parent}")
    return target


def plot(plan: Plan, target: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trained = [role for role in TRAINED if role in plan.layouts]
    rows = max(len(plan.layouts), len(trained))
    figure, axes = pyplot.subplots(rows, 2, figsize=(16, 3.2 * rows), squeeze=False, width_ratios=(1, 1.4))
    for row in axes:
        for one in row:
            one.set_axis_off()
    for one, (role, layout) in zip(axes[:, 0], plan.layouts.items()):
        _draw_grid(one, role, layout)
    for one, role in zip(axes[:, 1], trained):
        _draw_timeline(one, role, plan.layouts[role], plan.micro_batches[role])
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def _draw_grid(axes: Axes, role: str, layout: ParallelLayout) -> None:
    """A cell for each rank: a row for each pipeline stage and data-parallel rank, a column for each tp and cp rank."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    shown = min(layout.world_size, MOST_RANKS)
    columns = layout.tp * layout.cp
    colours: Any = colormaps["tab20"]
    for rank in range(shown):
        at = layout.coordinates(rank)
        x, y = rank % columns, rank // columns
        axes.add_patch(Rectangle((x, -y), 1, -1, facecolor=colours(at.pp % 20), edgecolor="white", alpha=0.75))
        if shown <= 64:
            axes.text(x + 0.5, -y - 0.5, f"{rank}\nt{at.tp} c{at.cp} d{at.dp} p{at.pp}", ha="center", va="center", fontsize=6)
    axes.set_xlim(0, columns)
    axes.set_ylim(-(-(-shown // columns)), 0)
    more = f", the first {shown} of {layout.world_size} ranks" if shown < layout.world_size else ""
    axes.set_title(f"{role}: {layout}\nrows: data-parallel rank and stage (colour); columns: tp, cp{more}", fontsize=9)


def _draw_timeline(axes: Axes, role: str, layout: ParallelLayout, num_micro_batches: int) -> None:
    """A row for each stage; darker colours are later chunks."""
    whole = timeline(layout, num_micro_batches)
    shown = timeline(layout, min(num_micro_batches, MOST_MICRO_BATCHES))
    for one in shown.passes:
        colour = _FORWARD if one.kind == "forward" else _BACKWARD
        alpha = 0.45 + 0.55 * (one.chunk + 1) / layout.vpp
        axes.barh(-one.stage, one.end - one.start, left=one.start, height=0.9, color=colour, alpha=alpha, edgecolor="white", lw=0.3)
        if len(shown.passes) <= 200:
            axes.text((one.start + one.end) / 2, -one.stage, str(one.micro_batch), ha="center", va="center", fontsize=6)
    axes.set_xlim(0, shown.total)
    first = f", the first {MOST_MICRO_BATCHES} drawn" if num_micro_batches > MOST_MICRO_BATCHES else ""
    axes.set_title(
        f"{role}: {num_micro_batches} micro-batches{first} through {layout.pp} stages of {layout.vpp} chunks, "
        f"bubble {100 * whole.bubble:.0f} %\nforward blue, backward orange; a row for each stage, stage 0 on top",
        fontsize=9,
    )  # fmt: skip
