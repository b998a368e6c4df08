"""Trackers: what they write is read back by other means, and what fails, blocks or dies there costs records and not the run."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megappo.config.redaction import redacted_values
from megappo.config.run_sections import TelemetryConfig
from megappo.telemetry.metrics import Metric
from megappo.telemetry.runlog import RunLog
from megappo.telemetry.trackers.base import Histogram, TrackedRun
from megappo.telemetry.trackers.group import FINISH_S, BackgroundTracker, TrackerError, make_trackers
from tests.listening import Watch
from tests.telemetry.wandb_files import read_wandb

LOST = Metric.LOST_RECORDS.value
SECRET = "hf_" + "s3cretS3cret" * 3
CONFIG = redacted_values({"policy": {"lr": 1e-6}, "reward": {"args": {"api_key": "s3cret", "url": SECRET}}})
ROW = {"id": "7", "score": 0.5, "prompt": "2+2=", "response": "# 4 ✓ \ud83d\n<b>", "answer": "4", "parts": {"exact": 1.0}}
BINS = Histogram((1, 0, 3), (-1.0, 0.0, 0.5, 2.0))


def steps_of(log: RunLog, first: int, last: int) -> None:
    for step in range(first, last + 1):
        log.step({"reward/score_mean": step / 10, "policy/grad_norm": math.nan}, step, last)
        log.histograms(step, {"policy/ratio": BINS})
        log.trajectories(step, [ROW, {**ROW, "score": None}])


def run(root: Path, name: str, first: int, last: int, *, resume: int | None = None, status: Any = "finished") -> RunLog:
    root.mkdir(exist_ok=True)
    telemetry = TelemetryConfig.model_validate({"trackers": [name]})
    log = RunLog(root, make_trackers(telemetry, "first", root), CONFIG, stream=io.StringIO())
    if resume is not None:
        log.resume_after(resume)
    steps_of(log, first, last)
    log.close(status)
    with mock.patch.dict(FINISH_S, dict.fromkeys(FINISH_S, 600.0)):  # a loaded machine
        log.wait()
    return log


def lines(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "is logged as null" not in r.getMessage()]


def test_tensorboard_shows_histograms_samples_and_the_configuration(tmp_path: Path) -> None:
    run(tmp_path, "tensorboard", 1, 3)
    run(tmp_path, "tensorboard", 3, 4, resume=2)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0, "histograms": 0}).Reload()
    assert [e.step for e in events.Scalars("reward/score_mean")] == [1, 2, 3, 4]
    shown = events.Histograms("policy/ratio")
    assert [e.step for e in shown] == [1, 2, 3, 4], "the resumed run's step 3 alone"
    found = shown[0].histogram_value
    assert (list(found.bucket_limit), list(found.bucket), found.num, found.min, found.max) == ([0, 0.5, 2], [1, 0, 3], 4, -1, 2)
    texts = events.Tensors("trajectories/text_summary")
    assert sorted({e.step for e in texts}) == [1, 2, 3, 4], "this reader hides no text; TensorBoard itself does"
    text = texts[0].tensor_proto.string_val[0].decode()
    assert "    # 4 ✓" in text and "\n    <b>" in text and "**prompt**" in text and "0.5" in text, "indented: no markup"
    config = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "lr: 1.0e-06" in config and "s3cret" not in config.lower()


# ------------------------------------------------------------------------------------------------- Weights & Biases


@pytest.fixture(scope="module")
def wandb_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Watch]]:
    """Steps 1 to 4, then a resume after step 2 to step 6."""
    pytest.importorskip("wandb")
    root = tmp_path_factory.mktemp("wandb") / "first"
    with pytest.MonkeyPatch.context() as patch, Watch(interval_s=0.2) as watch:
        for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
            patch.delenv(name, raising=False)
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("NETRC", str(root / "absent"))
        with mock.patch.dict(os.environ, {"WANDB_RUN_GROUP": "pair", "WANDB_TAGS": "a,b"}):
            run(root, "wandb", 1, 4)
            run(root, "wandb", 3, 6, resume=2, status="stopped")
    yield root, watch


def test_an_offline_run_of_wandb_is_continued_by_a_resumed_one(wandb_runs: tuple[Path, Watch]) -> None:
    root, _ = wandb_runs
    files = sorted((root / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    (first, early), (second, late) = (read_wandb(file) for file in files)
    tracked = json.loads((root / "trackers" / "wandb.json").read_text())
    assert first.run_id == second.run_id == tracked["id"] and tracked["step"] == 6
    assert (first.project, first.display_name, first.run_group, list(first.tags)) == ("megappo", "first", "pair", ["a", "b"])
    assert sorted(early) == [1, 2, 3, 4] and sorted(late) == [5, 6], "no step back: 3 and 4 are there"
    assert early[2]["reward/score_mean"] == 0.2 and "policy/grad_norm" not in early[2] and early[2][LOST] == 0
    assert {name: value for name, value in early[2].items() if name.startswith("policy/ratio")} == {
        "policy/ratio_histogram._type": "histogram",
        "policy/ratio_histogram.values": [1, 0, 3],
        "policy/ratio_histogram.bins": [-1.0, 0.0, 0.5, 2.0],
    }
    table = json.loads((files[0].parent / "files" / early[2]["trajectories.path"]).read_text())
    assert table["columns"] == ["id", "score", "prompt", "response", "answer"]
    assert table["data"][0][:3] == ["7", "0.5", "2+2="] and table["data"][1][1] == ""
    config = {item.key: json.loads(item.value_json) for item in first.config.update}
    assert config["policy"] == {"lr": 1e-6} and config["reward"] == {"args": {"api_key": "(hidden)", "url": "(hidden)"}}
    assert [r["step"] for r in lines(root)] == [1, 2, 3, 4, 5, 6] and not any(r[LOST] for r in lines(root))


def test_nothing_is_left_listening_running_or_told(wandb_runs: tuple[Path, Watch]) -> None:
    root, watch = wandb_runs
    assert not [found for found in watch.seen if "wandb" in found.command]
    assert not [p for p in psutil.Process().children(recursive=True) if "wandb" in p.name()]
    for path in root.rglob("*"):
        if path.is_file():
            assert b"s3cret" not in path.read_bytes().lower(), path


RANK = """
import io, os, signal, sys, time
import psutil
from pathlib import Path
from tests.telemetry.test_trackers import steps_of, make_trackers, RunLog, TelemetryConfig, CONFIG

root = Path(sys.argv[1])
root.mkdir()
telemetry = TelemetryConfig.model_validate({"trackers": ["wandb"]})
log = RunLog(root, make_trackers(telemetry, "killed", root), CONFIG, stream=io.StringIO())
steps_of(log, 1, 2)
state = root / "trackers" / "wandb.json"
while not (state.exists() and '"step": 2' in state.read_text()):
    time.sleep(0.05)
service = [p for p in psutil.Process().children(recursive=True) if "wandb-core" in p.name()]
print([p.pid for p in service], flush=True)
if sys.argv[2] == "rank":
    os.kill(os.getpid(), signal.SIGKILL)
[p.kill() for p in service]
steps_of(log, 3, 4)
log.close()
log.wait()
"""


@pytest.mark.slow
def test_the_service_of_wandb_ends_with_its_rank_and_the_rank_not_with_the_service(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for killed, code in (("rank", -signal.SIGKILL), ("service", 0)):
        command = [sys.executable, "-c", RANK, str(tmp_path / killed), killed]
        rank = subprocess.run(command, env={**os.environ, "WANDB_MODE": "offline"}, stdout=subprocess.PIPE, text=True, timeout=120)
        assert rank.returncode == code
        pids = json.loads(rank.stdout)
        assert pids, "wandb's service"
        eventually(lambda pids=pids: not any(psutil.pid_exists(pid) for pid in pids))
    assert [r["step"] for r in lines(tmp_path / "service")] == [1, 2, 3, 4]


def eventually(true: Any, limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


# ---------------------------------------------------------------------------------------------------------- MLflow


@pytest.mark.slow  # 7 s, of MLflow's imports
def test_a_run_of_mlflow_is_continued_by_a_resumed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    root = tmp_path / "first"
    run(root, "mlflow", 1, 4)
    run(root, "mlflow", 3, 6, resume=2, status="stopped")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow' / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("megappo").experiment_id])
    assert found.info.status == "KILLED" and found.info.run_name == "first"
    assert found.data.params["policy.lr"] == "1e-06" and found.data.params["reward.args.api_key"] == "(hidden)"
    history = client.get_metric_history(found.info.run_id, "reward/score_mean")
    assert [(m.step, m.value) for m in history] == [(step, step / 10) for step in range(1, 7)]
    artifacts = root / "mlflow" / found.info.run_id / "artifacts"
    shown = json.loads((artifacts / "histograms" / "step_000003.json").read_text())
    assert shown == {"policy/ratio": {"counts": [1, 0, 3], "edges": [-1.0, 0.0, 0.5, 2.0]}}
    assert "prompt: 2+2=\n" in (artifacts / "trajectories" / "step_000006.txt").read_text()
    assert "lr: 1.0e-06" in (artifacts / "config.yaml").read_text()
    assert json.loads((root / "trackers" / "mlflow.json").read_text()) == {"id": found.info.run_id, "step": 6}
    assert not any(r[LOST] for r in lines(root))


# --------------------------------------------------------------------------------------------------------- failures


class Failing:
    """A tracker whose method `broken` raises."""

    def __init__(self, broken: str) -> None:
        self.broken, self.took = broken, []
        self.calls_run = threading.Event()
        self.calls_run.set()

    def _called(self, name: str, *details: object) -> None:
        self.calls_run.wait()
        if name == self.broken:
            raise RuntimeError(f"no {name}")
        self.took.append((name, *details))

    def start(self, config, resumed_step) -> None:
        self._called("start", resumed_step)

    def metrics(self, step, values) -> None:
        self._called("metrics", step)

    def histograms(self, step, histograms) -> None:
        self._called("histograms", step)

    def text(self, step, name, rows) -> None:
        self._called("text", step)

    def finish(self, status) -> None:
        self._called("finish", status)


@pytest.mark.parametrize("broken", ["start", "metrics", "histograms", "text", "finish"])
def test_a_tracker_that_raises_costs_its_records_alone(tmp_path: Path, caplog, broken: str) -> None:
    bad, good = Failing(broken), Failing("")
    log = RunLog(tmp_path, {"bad": bad, "good": good}, stream=io.StringIO())
    log.resume_after(0)
    steps_of(log, 1, 2)
    log.close()
    log.wait()
    assert [one[0] for one in good.took] == ["start", *["metrics", "histograms", "text"] * 2, "finish"]
    assert good.took[0] == ("start", 0) and good.took[-1] == ("finish", "finished")
    assert [one for one in good.took if one[0] != broken] == bad.took
    first, *rest = warnings(caplog)
    assert first.startswith(f"bad: a record is lost (no {broken})") and all("records were lost" in text for text in rest)
    assert [r["step"] for r in lines(tmp_path)] == [1, 2]


class Waiting(Failing):
    """A tracker whose method `broken` sets `entered` and returns when `go` is set, and not before."""

    def __init__(self, broken: str) -> None:
        super().__init__("")
        self.stuck, self.entered, self.go, self.ended = broken, threading.Event(), threading.Event(), 0

    def _called(self, name: str, *details: object) -> None:
        if name == self.stuck:
            self.entered.set()
            self.go.wait()
        super()._called(name, *details)

    def end_service(self) -> None:
        self.ended += 1


def test_a_tracker_that_blocks_holds_no_step(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setitem(FINISH_S, "finished", 0.5)
    tracker = Waiting("metrics")
    log = RunLog(tmp_path, {"slow": BackgroundTracker("slow", tracker, tracker.end_service, max_waiting=4)}, stream=io.StringIO())
    for step in range(1, 41):
        log.step({"reward/score_mean": 1.0}, step, 40)
    log.close()
    log.wait()
    assert [r["step"] for r in lines(tmp_path)] == list(range(1, 41)) and tracker.ended == 1
    assert 20 < lines(tmp_path)[-1][LOST] < 40
    assert "slow: a record is lost (slow is too slow: 4 records are waiting)" in warnings(caplog)[0]
    tracker.go.set()


def test_an_end_that_never_comes_is_not_waited_for(monkeypatch) -> None:
    monkeypatch.setitem(FINISH_S, "stopped", 0.5)
    tracker = Waiting("finish")
    background = BackgroundTracker("slow", tracker, tracker.end_service)
    background.start({}, None)
    background.metrics(1, {})
    background.finish("stopped")
    assert tracker.entered.wait(20), "its thread has come to the end, however slow the machine"
    with pytest.raises(OSError, match="slow did not finish within 0.5 s and was left"):
        background.wait()
    assert tracker.took == [("start", None), ("metrics", 1)] and tracker.ended == 1
    tracker.go.set()


@pytest.mark.parametrize("broken", ["start", "metrics", "text"])
def test_a_tracker_that_has_failed_is_switched_off_and_told_once(tmp_path: Path, caplog, broken: str) -> None:
    tracker = Failing(broken)
    background = BackgroundTracker("bad", tracker)
    log = RunLog(tmp_path, {"bad": background}, stream=io.StringIO())
    tracker.calls_run.clear()  # it fails once all calls of step 1 wait for it
    steps_of(log, 1, 1)
    tracker.calls_run.set()
    background._thread.join(20)
    steps_of(log, 2, 3)
    log.close()
    log.wait()
    calls = ["start", "metrics", "histograms", "text"]
    assert [one[0] for one in tracker.took] == calls[: calls.index(broken)], "nothing after the failure"
    assert [r["step"] for r in lines(tmp_path)] == [1, 2, 3] and lines(tmp_path)[-1][LOST] == 3
    first, *rest = warnings(caplog)
    assert first.startswith(f"bad: a record is lost (RuntimeError: no {broken}; it is switched off)")
    assert all("records were lost" in text for text in rest)


def test_a_reason_is_one_line_without_passwords() -> None:
    tracker = Failing("")
    tracker.start = lambda *_: (_ for _ in ()).throw(OSError("\nno http://me:s3cret@host/x\nmore"))  # type: ignore[method-assign]
    background = BackgroundTracker("bad", tracker)
    background.start({}, None)
    background._thread.join(20)
    with pytest.raises(TrackerError, match=r"^OSError: no http://\(hidden\)@host/x$"):
        background.wait()


DIES = """
import sys
from pathlib import Path
from megappo.telemetry.trackers.group import BackgroundTracker

class Fake:
    def start(self, config, resumed_step): pass
    def metrics(self, step, values): pass
    def finish(self, status): Path(sys.argv[1]).write_text(status)

tracker = BackgroundTracker("fake", Fake())
tracker.start({}, None)
tracker.metrics(1, {})
raise RuntimeError("the rank")
"""


def test_the_run_of_a_rank_that_fails_is_closed_as_failed(tmp_path: Path) -> None:
    rank = subprocess.run([sys.executable, "-c", DIES, str(tmp_path / "end")], stderr=subprocess.PIPE, text=True, timeout=60)
    assert rank.returncode == 1 and rank.stderr.rstrip().endswith("RuntimeError: the rank")
    assert (tmp_path / "end").read_text() == "failed"


def test_steps_that_a_tracker_has_are_known_after_a_restart(tmp_path: Path) -> None:
    first = TrackedRun(tmp_path, "t")
    assert first.id is None and first.is_new(0)
    first.begin("abc")
    first.given(4)
    again = TrackedRun(tmp_path, "t")
    assert (again.id, again.is_new(4), again.is_new(5)) == ("abc", False, True)
    again.given(5)
    assert again.is_new(5), "more records of the same step"
