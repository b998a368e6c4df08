"""The best checkpoint: which step it is, what becomes of it on a resume, and that retention leaves it alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.manifest import Manifest, write_manifest
from megappo.trainer.save_schedule import BestCheckpoint
from megappo.trainer.state import TrainerState


def chosen(mode: str, values: list[float]) -> list[int]:
    """Steps that are the best so far, from step 1 on."""
    best = BestCheckpoint("eval/a", mode, TrainerState())
    return [step for step, value in enumerate(values, 1) if best.observe(step, {"eval/a": value, "eval/b": 100 - value})]


@pytest.mark.parametrize(
    "mode, values, steps",
    [
        ("max", [0.1, 0.3, 0.2, 0.4], [1, 2, 4]),
        ("min", [0.1, 0.3, 0.05, 0.4], [1, 3]),
        ("max", [0.3, 0.3, 0.3], [1]),  # the earlier of two equal ones
        ("max", [math.nan, 0.1, math.inf, 0.2, math.nan], [2, 4]),
    ],
)
def test_a_step_is_the_best_if_it_is_better_than_all_before(mode, values, steps):
    assert chosen(mode, values) == steps


def test_steps_without_the_metric_and_runs_without_keep_best_choose_nothing():
    state = TrainerState()
    assert not BestCheckpoint("eval/a", "max", state).observe(1, {"eval/b": 1.0})
    assert not BestCheckpoint(None, "max", state).observe(1, {"eval/a": 1.0})
    assert state.best is None


def resumed(metric: str | None, mode: str, steps: list[int]) -> tuple[str, TrainerState]:
    """Line of the log and state after a resume from a state whose best is step 4 by eval/a."""
    before, state = TrainerState(step=6), TrainerState()
    BestCheckpoint("eval/a", "max", before).observe(4, {"eval/a": 0.5})
    state.load_state_dict(json.loads(json.dumps(before.state_dict())))
    return BestCheckpoint(metric, mode, state).resume(steps), state


def test_the_best_goes_on_after_a_resume_while_its_checkpoint_is_there():
    line, state = resumed("eval/a", "max", [6, 4])
    assert line == "" and state.best == {"metric": "eval/a", "mode": "max", "step": 4, "value": 0.5}
    assert not BestCheckpoint("eval/a", "max", state).observe(7, {"eval/a": 0.4})


@pytest.mark.parametrize(
    "metric, mode, steps, says",
    [
        ("eval/a", "max", [6], "step 4 was the best by eval/a, and its checkpoint is gone; the next evaluation is the best so far"),
        ("eval/b", "max", [6, 4], "step 4 was the best by eval/a (max), which trainer.keep_best no longer names; the next"),
        ("eval/a", "min", [6, 4], "trainer.keep_best no longer names"),
        (None, "max", [6, 4], "trainer.keep_best no longer names"),
    ],
)
def test_what_does_not_count_any_more_is_said_once(metric, mode, steps, says):
    line, state = resumed(metric, mode, steps)
    assert says in line and state.best is None


def complete(folder: Path, *steps: int) -> CheckpointDirectory:
    for step in steps:
        (folder / f"step-{step}").mkdir(parents=True)
        write_manifest(folder / f"step-{step}", Manifest(step, 1, False, {}, {}))
    return CheckpointDirectory(folder, "owner")


def test_retention_leaves_the_best_and_the_newest(tmp_path):
    directory = complete(tmp_path, 1, 2, 3, 4, 5)
    assert sorted(directory.retain(2, {5, 2})) == [1, 3] and directory.steps() == [5, 4, 2]
    # It does not count among the newest, and goes when another is the best.
    assert directory.retain(2, {5, 4}) == [2] and directory.steps() == [5, 4]
    assert complete(tmp_path / "b", 1, 2, 3).retain(2, {3, None}) == [1], "without a best, as ever"


def test_the_name_of_the_best_is_written_and_removed(tmp_path):
    directory = complete(tmp_path, 1)
    directory.point_best_to(1)
    assert (tmp_path / "BEST").read_text() == "step-1\n"
    directory.point_best_to(None)
    assert not (tmp_path / "BEST").exists()
    directory.point_best_to(None)
