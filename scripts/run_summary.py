"""Summary of a finished run from its metrics.jsonl: scores, times and paths. `python scripts/run_summary.py RUN_DIR`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megappo.telemetry.metrics import Metric


def summary(run_dir: Path) -> str:
    """Return first and last evaluation, seconds per stage of a step, and the paths of the results. ValueError if there is no
    run."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{path} does not exist: {run_dir} holds no finished run")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [*_scores(rows), *_stages(rows)]
    lines += [
        f"learning curve:      {run_dir / 'learning_curve.svg'}",
        f"TensorBoard:         tensorboard --logdir {run_dir / 'tensorboard'}",
        f"sample trajectories: megappo trajectories {run_dir}",
        f"exported checkpoint: {run_dir / 'export'}",
    ]
    return "\n".join(lines)


def _scores(rows: Sequence[dict[str, Any]]) -> list[str]:
    name = Metric.EVAL_SCORE.value
    evaluated = [row for row in rows if row.get(name) is not None]
    if not evaluated:
        return []
    first, last = evaluated[0], evaluated[-1]
    return [f"held-out score:      {first[name]:.1%} at step {first['step']} -> {last[name]:.1%} at step {last['step']}"]


def _stages(rows: Sequence[dict[str, Any]]) -> list[str]:
    stages = [key for row in rows for key in row if _is_stage(key)]
    # Mean over all steps: a stage that runs every tenth step costs a tenth of its time per step.
    steps = [row for row in rows if row.get(Metric.STEP_SECONDS.value) is not None]
    means = {key: sum(row.get(key) or 0.0 for row in steps) / len(steps) for key in dict.fromkeys(stages)}
    parts = ", ".join(
        f"{key.removeprefix('timing/').removesuffix('_s')} {value:.2f}" for key, value in means.items() if value >= 0.005
    )
    whole = _mean(rows, Metric.STEP_SECONDS.value)
    return [f"seconds per step:    {whole:.2f} ({parts})"] if means else []


def _is_stage(key: str) -> bool:
    # `timing/reward/...` are parts of a stage
    return key.startswith("timing/") and key.count("/") == 1 and key != Metric.STEP_SECONDS.value


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else 0.0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/run_summary.py RUN_DIR")
    try:
        print(summary(Path(sys.argv[1])))
    except ValueError as error:
        sys.exit(str(error))
