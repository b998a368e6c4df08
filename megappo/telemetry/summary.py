"""Summary of a finished run: scores, times and paths, from what it has written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.config.run_directory import EXPORTED, METRICS
from megappo.telemetry.jsonl import read_lines
from megappo.telemetry.metrics import Metric
from megappo.telemetry.plot import NAMED_SCORE

# What a run leaves, and how it is looked at; {} stands for the path.
_RESULTS = {
    "learning curve": ("learning_curve.svg", "{}"),
    "TensorBoard": ("tensorboard", "tensorboard --logdir {}"),
    "trajectories": ("trajectories", "megappo trajectories {run}"),
    "model": (EXPORTED, "{}  (megappo generate {run} --prompt TEXT)"),
}

Rows = Sequence[Mapping[str, Any]]


def run_summary(run_dir: Path) -> list[str]:
    """Return the lines: first and last scores, seconds of a step and its stages, and the results that are there."""
    rows = read_lines(run_dir / METRICS)
    lines = [*_scores(rows), *_seconds(rows)]
    for what, (name, text) in _RESULTS.items():
        if (run_dir / name).exists():
            lines.append((what, text.format(run_dir / name, run=run_dir)))
    return [f"{what + ':':<20} {text}" for what, text in lines]


def _scores(rows: Rows) -> Iterator[tuple[str, str]]:
    """First and last score of every evaluation set, or of the training where nothing was evaluated."""
    sets = {Metric.EVAL_SCORE.value: "held-out"} if any(Metric.EVAL_SCORE in row for row in rows) else {}
    sets |= {name: found["name"] for row in rows for name in row if (found := NAMED_SCORE.fullmatch(name))}
    for metric, name in (sets or {Metric.SCORE_MEAN.value: "training"}).items():
        known = [row for row in rows if row.get(metric) is not None]
        if known:
            ends = [f"{_score(row[metric])} at step {row['step']}" for row in (known[0], known[-1])]
            yield f"{name} score", " -> ".join(ends)


def _score(value: float) -> str:
    return f"{value:.1%}" if 0 <= value <= 1 else f"{value:.4g}"


def _seconds(rows: Rows) -> Iterator[tuple[str, str]]:
    steps = [row for row in rows if row.get(Metric.STEP_SECONDS.value) is not None]
    # `timing/reward/...` are parts of a stage.
    stages = dict.fromkeys(key for row in steps for key in row if key.startswith("timing/") and key.count("/") == 1)
    # Mean over all steps: a stage that runs every tenth step costs a tenth of its time per step.
    means = {key: sum(row.get(key) or 0.0 for row in steps) / len(steps) for key in stages}
    if means:
        whole = means.pop(Metric.STEP_SECONDS.value)
        largest = sorted((key for key in means if means[key] >= 0.005), key=means.__getitem__, reverse=True)
        parts = ", ".join(f"{key.removeprefix('timing/').removesuffix('_s')} {means[key]:.2f}" for key in largest)
        yield "seconds per step", f"{whole:.2f} ({parts})"
