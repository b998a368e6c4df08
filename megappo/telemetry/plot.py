"""Pictures of curves by matplotlib: the learning curve of a run, and several runs beside each other."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megappo.config.supervised import KINDS
from megappo.telemetry.jsonl import read_lines, replace_file
from megappo.telemetry.metrics import Metric, of_kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = Mapping[str, Mapping[int, float | None]]
"""Name of a line -> step -> value, ascending; None where it was not finite."""

MOST_DOTS = 40  # values of a curve; more dots would hide its line
COLUMNS = 3
_PANEL_INCHES = (4.6, 2.7)
_TRAINING = "training"
LOSSES = tuple(of_kind(Metric.SFT_LOSS.value, kind) for kind in KINDS)
EVAL_ACCURACY = Metric.EVAL_PART.of("accuracy")
# Panels of the learning curve: title -> line -> metrics, of which a run has one.
LEARNING: Mapping[str, Mapping[str, Sequence[str]]] = {
    "score": {_TRAINING: [Metric.SCORE_MEAN.value], "held-out, greedy": [Metric.EVAL_SCORE.value]},
    "KL to the reference per response, nats": {_TRAINING: [Metric.KL_RESPONSE.value]},
    "KL to the teacher per token, nats": {_TRAINING: [Metric.KL_TEACHER_TOKEN.value]},
    "explained variance of the critic": {_TRAINING: [Metric.CRITIC_EXPLAINED_VARIANCE.value]},
    "entropy, nats per token": {_TRAINING: [Metric.POLICY_ENTROPY.value]},
    "response length, tokens": {_TRAINING: [Metric.RESPONSE_MEAN.value]},
    "loss": {_TRAINING: LOSSES, "held-out": [Metric.EVAL_LOSS.value]},
    "share of pairs in the right order": {
        _TRAINING: [Metric.REWARD_MODEL_ACCURACY.value, Metric.DPO_ACCURACY.value],
        "held-out": [EVAL_ACCURACY],
    },
}

# Mean score of a set of `evaluations`, which the user names.
NAMED_SCORE = re.compile(r"eval/(?P<name>[^/]+)/mean@\d+")


def write_learning_curve(run_dir: Path) -> Path | None:
    """Draw run_dir/metrics.jsonl to run_dir/learning_curve.svg, without panels that lack data; None if all do."""
    metrics = run_dir / "metrics.jsonl"
    panels = learning_curves(read_lines(metrics) if metrics.exists() else [])
    if not panels:
        return None
    path = run_dir / "learning_curve.svg"
    replace_file(path, picture_of(panels, f"{run_dir.name}, by step"))
    return path


def learning_curves(records: Sequence[Mapping[str, Any]]) -> dict[str, Curves]:
    """Return title -> lines for the panels of the learning curve in which a line has two points or more."""
    drawn = {}
    sets = {name: found["name"] for r in records for name in r if (found := NAMED_SCORE.fullmatch(name))}
    for title, lines in LEARNING.items():
        if title == "score":
            lines = {**lines, **{f"held-out {name}": [metric] for metric, name in sets.items()}}
        curves = {
            name: {r["step"]: r[metric] for r in records for metric in metrics if r.get(metric) is not None}
            for name, metrics in lines.items()
        }
        if any(len(curve) > 1 for curve in curves.values()):
            drawn[title] = {name: curve for name, curve in curves.items() if curve}
    return drawn


def picture_of(panels: Mapping[str, Curves], title: str = "", kind: str = "svg") -> bytes:
    """Draw a panel for each title and a line for each curve; panels without a finite value are left out. kind: svg, png or pdf."""
    import matplotlib

    picture = io.BytesIO()
    # Text stays text in an SVG: a quarter of the size. The salt makes two drawings of the same curves equal.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "megappo"}):
        figure_of(panels, title).savefig(picture, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else None)
    return picture.getvalue()


def figure_of(panels: Mapping[str, Curves], title: str = "") -> Figure:
    """Draw the panels in rows of COLUMNS with one legend for all. Lines break where a value was not finite."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawn = {
        name: curves
        for name, curves in panels.items()
        if any(value is not None for curve in curves.values() for value in curve.values())
    }
    columns = max(1, min(COLUMNS, len(drawn)))
    rows = max(1, math.ceil(len(drawn) / columns))
    figure = Figure(figsize=(columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1] + 0.4), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flat
    lines = {}
    for (name, curves), axes in zip(drawn.items(), places):  # in this order, or zip takes a place more than it needs
        for number, (line, curve) in enumerate(curves.items()):
            values = [math.nan if value is None else value for value in curve.values()]
            # Later lines are dashed, so that equal curves show that there are two.
            style, marker = "-" if number == 0 else "--", "." if len(curve) <= MOST_DOTS else ""
            (lines[line],) = axes.plot(list(curve), values, lw=1.3, ms=4, ls=style, marker=marker, color=f"C{number % 10}")
        axes.set_title(_plain(name), fontsize=9)
        axes.tick_params(labelsize=7)
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.set_xlabel("step", fontsize=7, loc="right")
        axes.grid(alpha=0.3)
    for axes in places:
        axes.set_axis_off()
    figure.suptitle(_plain(title), fontsize=11)
    names, wide = [_plain(name) for name in lines], min(4, max(1, len(lines)))
    figure.legend(lines.values(), names, loc="outside lower center", ncols=wide, fontsize=8, frameon=False)
    return figure


def _plain(text: str) -> str:
    # Between two dollar signs matplotlib reads mathematics
    return text.replace("$", r"\$")
