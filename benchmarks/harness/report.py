"""Measurements as a table, as JSON and as a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.model import PHASES, Line, Report

MIB = 2**20
TITLES = {"forward": "forward", "backward": "backward", "both": "fwd+bwd"}


def duration(seconds: float) -> str:
    """Format seconds with three digits and a suitable unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def table(report: Report) -> str:
    """Table of one problem: floors, a line per candidate, then the absent, failed and wrong ones."""
    phases = [phase for phase in PHASES if any(phase in line.times for line in report.lines)]
    head = ["candidate"]
    for phase in phases:
        head += [TITLES[phase], "spread", "x floor"]
    rows = [head + ["peak MiB", "workspace"]]
    for line in report.lines:
        if line.status == "measured":
            rows.append([line.candidate, *_cells(line, phases), *_memory(line)])
    floors = ", ".join(f"{TITLES.get(name, name)} {duration(seconds)}" for name, seconds in report.floors.items())
    probes = ", ".join(f"{name} {duration(t.shown)} +- {duration(t.spread / 2)}" for name, t in report.probes.items())
    return "\n".join(
        [
            f"{report.benchmark} {report.shape} {report.dtype}",
            f"  floor: {floors}",
            f"  probes: {probes}; copies {report.copy_bytes_per_s / 1e9:.1f} GB/s",
            *("  " + text for text in _aligned(rows)),
            *(f"  {line.candidate}: {line.status}: {line.reason}" for line in report.lines if line.status in ("failed", "wrong")),
            *(f"  absent ({reason}): {', '.join(names)}" for reason, names in _absent(report).items()),
            *(f"  note on {line.candidate}: {line.note}" for line in report.lines if line.note and line.status == "measured"),
        ]
    )


def markdown(reports: Sequence[Report], bars: Sequence[Any]) -> str:
    """Tables in Markdown: a title, the floors and the measurements; then the bars."""
    parts = []
    for report in reports:
        phases = [phase for phase in PHASES if any(phase in line.times for line in report.lines)]
        head = ["", *(cell for phase in phases for cell in (TITLES[phase], "x floor")), "workspace, MiB"]
        rows = [head, ["---", *["---:"] * (len(head) - 1)], ["*floor*", *_floor_cells(report, phases), ""]]
        for line in report.lines:
            if line.status == "measured":
                cells = [cell for i, cell in enumerate(_cells(line, phases)) if i % 3 != 1]
                rows.append([line.candidate, *cells, _memory(line)[1]])
        others = [f"{name} {duration(seconds)}" for name, seconds in report.floors.items() if name not in PHASES]
        title = f"**{report.benchmark} {report.shape} {report.dtype}**; copies {report.copy_bytes_per_s / 1e9:.1f} GB/s"
        parts.append("\n".join(["; ".join([title, *others]), "", *(f"| {' | '.join(row)} |" for row in rows)]))
    if bars:
        cells = [[bar.name, bar.required, bar.measured, bar.verdict] for bar in bars]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in [["bar", "required", "measured", ""], ["---"] * 4, *cells]))
    return "\n\n".join(parts) + "\n"


def _floor_cells(report: Report, phases: Sequence[str]) -> list[str]:
    return [cell for phase in phases for cell in (duration(report.floors[phase]) if phase in report.floors else "-", "")]


def _absent(report: Report) -> dict[str, list[str]]:
    """Names by reason."""
    found: dict[str, list[str]] = {}
    for line in report.lines:
        if line.status == "absent":
            found.setdefault(line.reason, []).append(line.candidate)
    return found


def _cells(line: Line, phases: Sequence[str]) -> Iterator[str]:
    for phase in phases:
        timing = line.times.get(phase)
        if timing is None:
            yield from ("-", "-", "-")
        else:
            yield from (duration(timing.shown), f"{100 * timing.spread / timing.median:.0f} %", _ratio(line.ratios.get(phase)))


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"


def _memory(line: Line) -> tuple[str, str]:
    if line.peak_bytes is None:
        return "-", "-"
    return f"{line.peak_bytes / MIB:.1f}", f"{(line.workspace_bytes or 0) / MIB:.1f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))) for row in rows]


def write_json(path: Path, machine: dict[str, Any], reports: Sequence[Report], bars: Sequence[Any]) -> None:
    """Write seconds and bytes under the field names of model.py."""
    cases = [asdict(report) for report in reports]
    for case, report in zip(cases, reports):
        for line, measured in zip(case["lines"], report.lines):
            line["workspace_bytes"] = measured.workspace_bytes
    text = json.dumps({"machine": machine, "cases": cases, "bars": [asdict(bar) for bar in bars]}, indent=1, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def write_plot(path: Path, title: str, reports: Sequence[Report]) -> None:
    """A panel per problem: time of the whole (forward and backward, or forward alone) on a log scale, the floor as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(report, [line for line in report.lines if line.times]) for report in reports]
    panels = [(report, lines) for report, lines in panels if lines]
    heights = [len(lines) + 2 for _, lines in panels]
    figure = Figure(figsize=(9, 0.28 * sum(heights) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9)
    colours = {"ours": "tab:blue", "torch": "tab:gray", "compile": "tab:olive", "peer": "tab:orange"}
    axes = figure.subplots(max(len(panels), 1), 1, squeeze=False, gridspec_kw={"height_ratios": heights or [1]})[:, 0]
    for axis, (report, lines) in zip(axes, panels):
        phase = "both" if any("both" in line.times for line in lines) else "forward"
        shown = [line for line in lines if phase in line.times][::-1]
        milliseconds = [1e3 * line.times[phase].shown for line in shown]
        axis.barh([line.candidate for line in shown], milliseconds, color=[colours[line.kind] for line in shown])
        axis.axvline(1e3 * report.floors[phase], color="black", linestyle="--", linewidth=1)
        axis.set_xscale("log")
        axis.tick_params(labelsize=7)
        axis.set_title(f"{report.benchmark} {report.shape} {report.dtype}, {TITLES[phase]}, ms (dashed: floor)", fontsize=8)
    figure.savefig(path, dpi=120)
