"""Picture of a plan: the rank grid of every role and of vLLM's replicas, and the pipeline of every trained role with its bubble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megappo.commands.plan.estimate import Plan
from megappo.commands.plan.timeline import Pass, Timeline, padded_micro_batches
from megappo.config.layout_checks import trained_sections
from megappo.parallel.layout import ParallelLayout, Placement
from megappo.telemetry.tables import ranks_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")
MOST_SINGLE_RANKS = 64  # in larger worlds a cell is a tensor-parallel group
CELLS_WIDE = 16  # cells side by side with legible numbers
MOST_LABELS = 512  # cells; more have no numbers
LEGIBLE_TIME = 45.0  # forwards of a stage, side by side
_FORWARD, _BACKWARD, _WAITING, _REPLICA = "#4c72b0", "#dd8452", "#e8e8e8", "#b8b8b8"
_LINE_INCHES, _HEAD_INCHES, _WIDTH_INCHES = 0.27, 1.25, 17.0


def plot(plan: Plan, target: Path) -> None:
    figure_of(plan).savefig(target, dpi=110)


def figure_of(plan: Plan) -> Figure:
    """Draw a row for each role: its ranks on the left, its pipeline on the right."""
    from matplotlib.figure import Figure

    grids = {role: _grid(layout) for role, layout in plan.layouts.items()}
    lines = [max(4, grid.num_lines) for grid in grids.values()]
    if plan.rollout is not None:
        tp = plan.config.rollout.tp
        replicas = _Grid([[range(start, start + tp) for start in range(0, len(plan.placements["rollout"]), tp)]], [_REPLICA])
        lines.append(replicas.num_lines)
    heights = [_HEAD_INCHES + _LINE_INCHES * count for count in lines]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights) + 0.4), layout="constrained")
    axes = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights, width_ratios=(1, 1.3))
    figure.suptitle(f"{plan.config.run.name}: {plan.world_size} ranks", fontsize=13)
    for row, (role, layout) in zip(axes, plan.layouts.items()):
        _draw_grid(row[0], f"{role}: {layout}{_counted(plan.placements[role])}\n{_reading(layout)}", grids[role])
        if role in trained_sections(plan.config):
            _draw_pipeline(row[1], plan, role)
        else:
            row[1].set_axis_off()
    if plan.rollout is not None:
        _draw_grid(
            axes[-1][0],
            f"rollout: vLLM, tp {tp}{_counted(plan.placements['rollout'])}; a cell is one of {plan.replicas} replicas",
            replicas,
        )
        axes[-1][1].set_axis_off()
    return figure


def _counted(placement: Placement) -> str:
    # Cells count the ranks of a role from 0, so the title names its ranks in the world.
    return "" if placement.is_whole else f", counted from 0 on ranks {placement}"


# ----------------------------------------------------------------------------------------------------------------- ranks


@dataclass(frozen=True)
class _Grid:
    stages: list[list[range]]  # [stage][cell] ranks
    colours: Sequence[Any]  # one per stage
    experts: Mapping[int, int] = field(default_factory=dict)  # rank -> its part of the experts; empty without experts

    @property
    def has_labels(self) -> bool:
        return sum(map(len, self.stages)) <= MOST_LABELS

    @property
    def cells_wide(self) -> int:
        # A cell must have room for the longest label.
        if not self.has_labels:
            return 4 * CELLS_WIDE
        # The last label has the largest numbers; 7 characters fit a cell.
        return CELLS_WIDE if len(self.label(self.stages[-1][-1])) <= 7 else CELLS_WIDE // 2

    @property
    def num_lines(self) -> int:
        return sum(len(self.lines(stage)) for stage in self.stages)

    def lines(self, cells: Sequence[range]) -> list[Sequence[range]]:
        return [cells[start : start + self.cells_wide] for start in range(0, len(cells), self.cells_wide)]

    def label(self, ranks: range) -> str:
        experts = sorted(self.experts[rank] for rank in ranks if rank in self.experts)
        return ranks_text(ranks) + (f" e{ranks_text(experts)}" if experts else "")


def _grid(layout: ParallelLayout) -> _Grid:
    from matplotlib import colormaps

    shades: Any = colormaps["tab20"]
    size = 1 if layout.world_size <= MOST_SINGLE_RANKS else layout.tp
    stage = layout.world_size // layout.pp
    cells = [[range(rank, rank + size) for rank in range(s * stage, (s + 1) * stage, size)] for s in range(layout.pp)]
    # Neighbours of tab20 are shades of one colour: take every second first.
    colours = [shades((2 * s) % 20 + (s // 10) % 2) for s in range(layout.pp)]
    groups = layout.axis_groups("ep") if layout.ep > 1 else []
    return _Grid(cells, colours, {rank: place for group in groups for place, rank in enumerate(group)})


def _reading(layout: ParallelLayout) -> str:
    single = layout.world_size <= MOST_SINGLE_RANKS or layout.tp == 1
    axes = [axis for axis in ("tp", "cp", "dp") if getattr(layout, axis) > 1 and (single or axis != "tp")]
    what = "a cell is a rank" if single else f"a cell is a tp group of {layout.tp} ranks"
    order = f"; in a stage, the fastest first: {', '.join(f'{axis} {getattr(layout, axis)}' for axis in axes)}" if axes else ""
    return what + order + (f"; e: experts' part of {layout.ep}" if layout.ep > 1 else "")


def _draw_grid(axes: Axes, title: str, grid: _Grid) -> None:
    from matplotlib.patches import Rectangle

    columns, y, ticks = 1, 0, []
    for cells_of_stage, colour in zip(grid.stages, grid.colours):
        lines = grid.lines(cells_of_stage)
        ticks.append(y + len(lines) / 2)
        for cells in lines:
            columns = max(columns, len(cells))
            for x, ranks in enumerate(cells):
                axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", alpha=0.75, lw=0.8))
                if grid.has_labels:
                    axes.text(x + 0.5, y + 0.5, grid.label(ranks), ha="center", va="center", fontsize=6.5)
            y += 1
    axes.set_xlim(0, columns)
    axes.set_ylim(y, 0)
    _bare(axes, title)
    if len(grid.stages) > 1:
        axes.set_yticks(ticks, [f"stage {s}" for s in range(len(grid.stages))], fontsize=7)


def _bare(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=8.5, loc="left")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


# -------------------------------------------------------------------------------------------------------------- pipeline


def _draw_pipeline(axes: Axes, plan: Plan, role: str) -> None:
    from matplotlib.patches import Patch

    layout, whole = plan.layouts[role], plan.pipeline(role)
    windows = _windows(whole, layout)
    end = windows[-1].stop - windows[-1].shift
    for stage in range(layout.pp):
        _box(axes, 0.0, end, stage, facecolor=_WAITING)
    legible = end / (110 if whole.passes[-1].micro_batch > 9 else 150)
    for one in whole.passes:
        for window in windows:
            start, stop = max(one.start, window.start), min(one.end, window.stop)
            if start < stop:
                _draw_pass(axes, one, start - window.shift, stop - window.shift, layout.vpp, stop - start > legible)
    if len(windows) > 1:
        left, right = windows[0].stop, windows[1].start - windows[1].shift
        axes.axvspan(left, right, color="white")
        axes.text((left + right) / 2, (layout.pp - 1) / 2, "...", ha="center", va="center", fontsize=9)
    micro = plan.micro_batches[role]
    count = padded_micro_batches(layout, micro)
    padded = f" ({micro} raised to a multiple of pp)" if count > micro else ""
    schedule = f"interleaved 1F1B, {layout.vpp} chunks a stage" if layout.vpp > 1 else "1F1B"
    part = ", its beginning and its end" if len(windows) > 1 else ""
    stages = "1 stage" if layout.pp == 1 else f"{layout.pp} stages"
    batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    title = f"{role}: {batches}{padded} through {stages}, {schedule}{part}"
    _bare(axes, f"{title}\nbubble {100 * whole.bubble:.1f} % of the time")
    axes.set_yticks(range(layout.pp), [f"stage {s}" for s in range(layout.pp)], fontsize=7)
    axes.set_xlim(0, end)
    axes.set_ylim(layout.pp - 0.4, -0.6)
    known = [Patch(color=_FORWARD, label="forward"), Patch(color=_BACKWARD, label="backward"), Patch(color=_WAITING, label="waits")]
    names = "numbers: micro-batches" + ("; darker: later chunks" if layout.vpp > 1 else "")
    axes.legend(handles=known, loc="upper left", bbox_to_anchor=(0, 0), ncols=3, fontsize=7, frameon=False, borderaxespad=0.2)
    axes.set_xlabel(f"time; {names}", fontsize=7, loc="right")


@dataclass(frozen=True)
class _Window:
    """Part of the time axis to draw, moved `shift` to the left."""

    start: float
    stop: float
    shift: float


def _windows(whole: Timeline, layout: ParallelLayout) -> list[_Window]:
    """The whole schedule if it is legible in one line; otherwise its warm-up and its end, each with some of the steady state."""
    longest = max(one.end - one.start for one in whole.passes) * layout.vpp
    part = (1.0 + longest) * layout.pp + 8.0
    if whole.total <= max(LEGIBLE_TIME, 2.1 * part):
        return [_Window(0.0, whole.total, 0.0)]
    return [_Window(0.0, part, 0.0), _Window(whole.total - part, whole.total, whole.total - 2.05 * part)]


def _draw_pass(axes: Axes, one: Pass, start: float, stop: float, vpp: int, labelled: bool) -> None:
    colour = _FORWARD if one.kind == "forward" else _BACKWARD
    shade = 0.45 + 0.55 * (one.chunk + 1) / vpp
    _box(axes, start, stop, one.stage, facecolor=colour, alpha=shade, edgecolor="white", lw=0.3)
    if labelled:
        axes.text((start + stop) / 2, one.stage, str(one.micro_batch), ha="center", va="center", fontsize=5.5)


def _box(axes: Axes, start: float, stop: float, stage: int, **look: Any) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((start, stage - 0.45), stop - start, 0.9, **look))
