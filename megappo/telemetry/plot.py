"""Learning curve of a run as an SVG, drawn from its metrics.jsonl with the standard library alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from megappo.telemetry.jsonl import read_lines, replace_file
from megappo.telemetry.metrics import Metric

WIDTH, HEIGHT = 420, 240  # of a panel, px
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 34  # margins of a panel, px
COLORS = ("#1f6fb2", "#d1581f")


@dataclass(frozen=True)
class Panel:
    """One set of axes with one or two curves."""

    title: str
    curves: tuple[tuple[str, Metric], ...]


PANELS = (
    Panel("score", (("training", Metric.SCORE_MEAN), ("held-out, greedy", Metric.EVAL_SCORE))),
    Panel("KL to the reference per response, nats", (("", Metric.KL_RESPONSE),)),
    Panel("explained variance of the critic", (("", Metric.CRITIC_EXPLAINED_VARIANCE),)),
    Panel("entropy, nats per token", (("", Metric.POLICY_ENTROPY),)),
    Panel("response length, tokens", (("", Metric.RESPONSE_MEAN),)),
    Panel("loss of supervised fine-tuning, nats per token", (("", Metric.SFT_LOSS),)),
)


def write_learning_curve(run_dir: Path) -> Path | None:
    """Draw run_dir/metrics.jsonl to run_dir/learning_curve.svg, without panels that lack data; None if all do."""
    metrics = run_dir / "metrics.jsonl"
    records = read_lines(metrics) if metrics.exists() else []
    picture = learning_curve_svg(records, run_dir.name)
    if picture is None:
        return None
    path = run_dir / "learning_curve.svg"
    replace_file(path, picture.encode("utf-8"))
    return path


def learning_curve_svg(records: Sequence[dict[str, Any]], title: str) -> str | None:
    """Draw two columns of panels over the steps."""
    drawn = []
    for panel in PANELS:
        curves = [(label, _points(records, metric)) for label, metric in panel.curves]
        if any(len(points) > 1 for _, points in curves):
            drawn.append(_panel(panel.title, [(label, points) for label, points in curves if points]))
    if not drawn:
        return None
    columns = min(2, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    placed = "".join(
        f'<g transform="translate({i % columns * WIDTH},{30 + i // columns * HEIGHT})">{panel}</g>' for i, panel in enumerate(drawn)
    )
    width, height = columns * WIDTH, 30 + rows * HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}, by step</text>{placed}</svg>\n'
    )


def _points(records: Sequence[dict[str, Any]], metric: Metric) -> list[tuple[int, float]]:
    return [(r["step"], r[metric.value]) for r in records if r.get(metric.value) is not None]


def _panel(title: str, curves: Sequence[tuple[str, list[tuple[int, float]]]]) -> str:
    steps = [step for _, points in curves for step, _ in points]
    values = [value for _, points in curves for _, value in points]
    x_ticks, y_ticks = _ticks(min(steps), max(steps), whole=True), _ticks(min(values), max(values))

    def x(step: float) -> float:
        return LEFT + (step - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="{TOP - 14}" font-weight="bold">{escape(title)}</text>']
    for tick in y_ticks:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:g}</text>')
    for number, (_, points) in enumerate(curves):
        color = COLORS[number]
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        if len(points) <= 40:  # more dots would hide the line
            parts += [f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.2" fill="{color}"/>' for step, value in points]
    names = "  ".join(f'<tspan fill="{COLORS[n]}">{escape(label)}</tspan>' for n, (label, _) in enumerate(curves))
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{TOP - 14}" text-anchor="end" xml:space="preserve">{names}</text>')
    return "".join(parts)


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """About five round numbers that enclose low and high."""
    if high <= low:
        high = low + (1.0 if whole else max(abs(low) * 0.1, 1e-6))
    rough = (high - low) / 4  # four intervals
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= rough * 0.999)  # 0.999: rounding
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(i * step, 12) for i in range(first, last + 1)]  # 0.3, not 0.30000000000000004
