"""The lines with which a run ends."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from megappo.telemetry.runlog import RunLog
from megappo.telemetry.summary import run_summary


def written(run_dir: Path, rows: list[dict[str, Any]], *results: str) -> list[str]:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows)))
    for name in results:
        (run_dir / name).mkdir()
    return run_summary(run_dir)


def test_scores_of_all_sets_times_of_a_mean_step_and_what_is_there(tmp_path: Path) -> None:
    step = {"timing/step_s": 3.0, "timing/generate_s": 2.0, "timing/reward/a_s": 9.0}
    rows = [{"eval/score": 0.5, "eval/hard/mean@8": 2.5, "eval/exact_match": 1.0}, step, {**step, "timing/evaluate_s": 0.5}]
    rows += [{"eval/score": None}, {"eval/score": 0.75, "eval/hard/mean@8": -1.0}]
    assert written(tmp_path / "run", rows, "export", "tensorboard") == [
        "held-out score:      50.0% at step 0 -> 75.0% at step 4",
        "hard score:          2.5 at step 0 -> -1 at step 4",
        "seconds per step:    3.00 (generate 2.00, evaluate 0.25)",
        f"TensorBoard:         tensorboard --logdir {tmp_path}/run/tensorboard",
        f"model:               {tmp_path}/run/export  (megappo generate {tmp_path}/run --prompt TEXT)",
    ]


def test_without_evaluations_the_score_of_the_steps(tmp_path: Path) -> None:
    assert written(tmp_path, [{}, {"reward/score_mean": 0.25}, {"reward/score_mean": 0.5}]) == [
        "training score:      25.0% at step 1 -> 50.0% at step 2"
    ]


def test_a_supervised_run_ends_with_its_held_out_figures_or_the_loss_of_the_steps(tmp_path: Path) -> None:
    rows = [
        {"eval/loss": 0.75, "eval/accuracy": 0.5},
        {"dpo/loss": 0.5},
        {"dpo/loss": 0.25, "eval/loss": 0.125, "eval/accuracy": 1},
    ]
    assert written(tmp_path, rows) == [
        "held-out loss:       0.75 at step 0 -> 0.125 at step 2",
        "held-out accuracy:   50.0% at step 0 -> 100.0% at step 2",
    ]
    assert written(tmp_path, [{}, {"sft/loss": 2.5}, {"sft/loss": 0.5}]) == ["training loss:       2.5 at step 1 -> 0.5 at step 2"]


def test_a_run_whose_metrics_are_gone_has_ended_all_the_same(tmp_path: Path, caplog) -> None:
    stream = io.StringIO()
    log = RunLog(tmp_path, stream=stream)
    (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
    log.summary()
    assert stream.getvalue() == "" and "a record is lost" in caplog.text
