"""Predicted seconds beside measured ones: once, after steps that count, and only where something was predicted."""

from __future__ import annotations

import io
import json

from megappo.config.run_directory import PREDICTED, holds_run
from megappo.telemetry.predicted import SETTLED, Beside
from megappo.telemetry.runlog import RunLog

FACTS = {
    "responses": [100.0, 200.0, 400.0],
    "stages": {"generate": [10.0, 20.0, 40.0], "score": None, "update_policy": [4.0, 5.0, 7.0], "update_critic": [1.0, 1.0, 1.0]},
    "step": None,
}


def row(step):
    slow = 100.0 if step == 1 else 0.0  # it compiles and connects
    return {
        "lengths/response_mean": 300.0,
        "timing/generate_s": 33.0 + slow,
        "timing/score_s": 2.0,
        "timing/update_policy_s": 3.0,
        "timing/step_s": 40.0 + slow,
    }


def logged(root, gpu, steps):
    stream = io.StringIO()
    log = RunLog(root, stream=stream, beside=Beside.of(root, gpu))
    for step in range(1, steps + 1):
        log.step(row(step), step, steps)
    log.close()
    return stream.getvalue()


def test_a_log_shows_them_once(tmp_path):
    (tmp_path / PREDICTED).write_text(json.dumps({"h100": FACTS}))
    assert not holds_run(tmp_path), "it precedes the run"
    text = logged(tmp_path, "h100", 12)
    assert text.count("predicted for h100") == 1 and "responses of 300 tokens, beside the median of 3 steps" in text
    before = text.split("predicted for")[0]
    assert f"{SETTLED}/12" in before and f"{SETTLED + 1}/12" not in before
    words = [line.split() for line in text.splitlines()]
    assert ["generate", "30.0", "33.0", "1.10"] in words, "between 20 s at 200 tokens and 40 s at 400"
    assert ["update_policy", "6.00", "3.00", "0.50"] in words
    assert ["score", "unknown", "2.00"] in words and ["whole", "step", "unknown", "40.0"] in words
    assert not any(one[:1] == ["update_critic"] for one in words), "the run has no such stage"


def test_a_short_run_shows_them_at_its_end(tmp_path):
    (tmp_path / PREDICTED).write_text(json.dumps({"h100": FACTS}))
    assert "beside the median of 1 steps" in logged(tmp_path, "h100", 2)
    assert "predicted" not in logged(tmp_path, "h100", 1), "only the step that compiles"


def test_nothing_is_shown_without_a_prediction_for_this_gpu(tmp_path):
    assert "predicted" not in logged(tmp_path, "h100", 6)
    (tmp_path / PREDICTED).write_text(json.dumps({"h100": FACTS}))
    for gpu in ("h20", None):
        assert "predicted" not in logged(tmp_path, gpu, 6)
