"""Summary of a finished run: scores, times and paths, from what it has written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.config.run_directory import EXPORTED, METRICS
from megappo.telemetry.jsonl import read_lines
from megappo.telemetry.metrics import Metric
from megappo.telemetry.plot import EVAL_ACCURACY, LOSSES, NAMED_SCORE

# What a run leaves, and how it is looked at; {} stands for the path.
_RESULTS = {
    "learning curve": ("learning_curve.svg", "{}"),
    "TensorBoard": ("tensorboard", "tensorboard --logdir {}"),
    "trajectories": ("trajectories", "megappo trajectories {run}"),
    "model": (EXPORTED, "{}  (megappo generate {run} --prompt TEXT)"),
}
_OF_REWARD_MODEL = {"model": (EXPORTED, "{}  (reward_model.model of a run of PPO)")}

_HELD_OUT = {Metric.EVAL_SCORE.value: "held-out score", Metric.EVAL_LOSS.value: "held-out loss", EVAL_ACCURACY: "held-out accuracy"}
_OF_TRAINING = {Metric.SCORE_MEAN.value: "training score", **dict.fromkeys(LOSSES, "training loss")}

Rows = Sequence[Mapping[str, Any]]


def run_summary(run_dir: Path) -> list[str]:
    """Return the lines: first and last scores, seconds of a step and its stages, and the results that are there."""
    rows = read_lines(run_dir / METRICS)
    lines = [*_scores(rows), *_seconds(rows)]
    scores = any(Metric.REWARD_MODEL_LOSS in row for row in rows)
    for what, (name, text) in (_RESULTS | _OF_REWARD_MODEL if scores else _RESULTS).items():
        if (run_dir / name).exists():
            lines.append((what, text.format(run_dir / name, run=run_dir)))
    return [f"{what + ':':<20} {text}" for what, text in lines]


def _scores(rows: Rows) -> Iterator[tuple[str, str]]:
    """First and last score of every evaluation set, in a supervised run loss and accuracy, or those of the training where nothing
    was evaluated."""
    logged = dict.fromkeys(name for row in rows for name in row)
    held_out = {name: text for name, text in _HELD_OUT.items() if name in logged}
    held_out |= {name: f"{found['name']} score" for name in logged if (found := NAMED_SCORE.fullmatch(name))}
    for metric, name in (held_out or _OF_TRAINING).items():
        known = [row for row in rows if row.get(metric) is not None]
        if known:
            ends = [f"{_value(row[metric], name)} at step {row['step']}" for row in (known[0], known[-1])]
            yield name, " -> ".join(ends)


def _value(value: float, name: str) -> str:
    return f"{value:.1%}" if 0 <= value <= 1 and not name.endswith("loss") else f"{value:.4g}"


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
