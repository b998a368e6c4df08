"""Full samples of a step in files of their own: prompt, response, token ids, and every per-token number that PPO used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.telemetry.jsonl import write_lines


def trajectory_file(run_dir: Path, step: int) -> Path:
    return run_dir / "trajectories" / f"step_{step:06d}.jsonl"


def write_trajectories(run_dir: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
    """One JSON object per sample; a step that a resumed run repeats replaces its file. Returns the path.

    Every list that is as long as `response_tokens` has one number per response token. The fields are those of
    `trainer.report.trajectories_of`.
    """
    path = trajectory_file(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_lines(path, [{"step": step, **row} for row in rows])
    return path
