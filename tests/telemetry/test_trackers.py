"""Trackers: what they write is read back by other means, and what fails, blocks or dies there costs records and not the run."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import signal
import subprocess
import sys
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
from megappo.telemetry.trackers import process
from megappo.telemetry.trackers.base import Histogram
from megappo.telemetry.trackers.group import FINISH_S, make_trackers
from megappo.telemetry.trackers.helper import HelperTracker
from megappo.telemetry.trackers.state import TrackedRun
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
    values = {"trackers": [name], "mode": "offline", "project": "ours", "group": "pair", "tags": ["a", "b"]}
    telemetry = TelemetryConfig.model_validate(values)
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
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(root / "absent"))
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
    assert (first.project, first.display_name, first.run_group, list(first.tags)) == ("ours", "first", "pair", ["a", "b"])
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
    assert not [found for found in watch.seen if "wandb" in found.command or "trackers" in found.command]
    left = [p for p in psutil.Process().children(recursive=True) if "trackers.process" in " ".join(p.cmdline())]
    assert not left
    for path in root.rglob("*"):
        if path.is_file():
            assert b"s3cret" not in path.read_bytes().lower(), path


RANK = """
import io, os, signal, sys, time
import psutil
from pathlib import Path
from tests.telemetry.test_trackers import steps_of, make_trackers, RunLog, TelemetryConfig, CONFIG

def service():
    return [p for p in psutil.Process().children(recursive=True) if "wandb-core" in " ".join(p.cmdline())]

root = Path(sys.argv[1])
telemetry = TelemetryConfig.model_validate({"trackers": ["wandb"], "mode": "offline"})
trackers = make_trackers(telemetry, "killed", root)
log = RunLog(root, trackers, CONFIG, stream=io.StringIO())
steps_of(log, 1, 2)
state = root / "trackers" / "wandb.json"
while not (state.exists() and '"step": 2' in state.read_text()):
    time.sleep(0.05)
[process.terminate() for process in (trackers["wandb"]._process, *service())]
time.sleep(1)
steps_of(log, 3, 6)
while '"step": 6' not in state.read_text():
    time.sleep(0.05)
print([p.pid for p in psutil.Process().children(recursive=True)], log._side_work.num_lost, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_wandb_goes_on_after_the_death_of_its_service_and_ends_with_its_rank(tmp_path: Path) -> None:
    """Slurm sends a request to stop to every process of a step, in whatever session, and wandb's service takes it."""
    pytest.importorskip("wandb")
    rank = subprocess.run([sys.executable, "-c", RANK, str(tmp_path)], stdout=subprocess.PIPE, text=True, timeout=120)
    assert rank.returncode == -signal.SIGKILL
    pids = json.loads(rank.stdout.split("]")[0] + "]")
    assert len(pids) >= 2, "the helper, and wandb's services, dead and alive"
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    # What the service of wandb had not yet written to its first file ended with it.
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    found, rows = read_wandb(files[-1])
    assert len(files) == 2 and found.run_id == json.loads((tmp_path / "trackers" / "wandb.json").read_text())["id"]
    assert {4, 5} <= rows.keys() <= {3, 4, 5, 6}


# ---------------------------------------------------------------------------------------------------------- MLflow


@pytest.mark.slow  # 7 s, of MLflow's imports
def test_a_run_of_mlflow_is_continued_by_a_resumed_one(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    root = tmp_path / "first"
    run(root, "mlflow", 1, 4)
    run(root, "mlflow", 3, 6, resume=2, status="stopped")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow' / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
    assert found.info.status == "KILLED" and found.info.run_name == "first"
    assert found.data.tags["group"] == "pair" and found.data.tags["b"] == "true"
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

    def _called(self, name: str, *details: object) -> None:
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


FAKE = """
import os, sys, time
from megappo.telemetry.trackers import process

class Fake:
    def __init__(self, root, telemetry, note):
        self.root, self.what = root, telemetry.project
        note("fake: here")
    def start(self, config, resumed_step):
        if self.what == "no start":
            raise OSError("no network")
    def metrics(self, step, values):
        if self.what == "block":
            time.sleep(1000)
        if self.what == "die":
            os._exit(3)
        with open(self.root / "took", "a") as file:
            file.write(f"{step}\\n")
    def finish(self, status):
        with open(self.root / "took", "a") as file:
            file.write(f"{status}\\n")
        if self.what == "endless":
            time.sleep(1000)

process.TRACKERS["fake"] = Fake
process.main(sys.argv[-2], int(sys.argv[-1]))
"""


def helper(root: Path, monkeypatch: pytest.MonkeyPatch, what: str, **options: Any) -> HelperTracker:
    """A tracker that does `what`, in a helper process."""
    script = root / "fake.py"
    script.write_text(FAKE)
    launcher = root / "python"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setattr("megappo.telemetry.trackers.helper.sys.executable", str(launcher))
    return HelperTracker("fake", root, TelemetryConfig(project=what), **options)


def took(root: Path) -> list[str]:
    return (root / "took").read_text().split() if (root / "took").exists() else []


def eventually(true: Any, limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


def test_a_tracker_that_blocks_holds_no_step_and_is_ended(tmp_path: Path, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("megappo.telemetry.trackers.group.FINISH_S", {"finished": 0.5})
    tracker = helper(tmp_path, monkeypatch, "block", max_waiting=4)
    log = RunLog(tmp_path, {"fake": tracker}, stream=io.StringIO())
    slowest = 0.0
    log.step({}, 1, 40)
    assert tracker._process is not None
    eventually(lambda: tracker._replies or any(r.getMessage() == "fake: here" for r in caplog.records))
    for step in range(2, 41):
        begin = time.thread_time()  # of this thread: a loaded machine does not count
        log.step({"reward/score_mean": 1.0, "x" * 20_000: 2.0}, step, 40)
        slowest = max(slowest, time.thread_time() - begin)
    log.close()
    log.wait()
    assert slowest < 1.0 and [r["step"] for r in lines(tmp_path)] == list(range(1, 41))
    assert tracker._process.returncode == -signal.SIGKILL
    assert 20 < lines(tmp_path)[-1][LOST] < 40
    assert "fake: a record is lost (fake is too slow: 4 records are waiting)" in warnings(caplog)[0]
    assert log._side_work.lost["fake"] > lines(tmp_path)[-1][LOST], "the end counts too"


def test_an_end_that_never_comes_is_not_waited_for(tmp_path: Path, monkeypatch) -> None:
    tracker = helper(tmp_path, monkeypatch, "endless")
    tracker.start({}, None)
    tracker.metrics(1, {})
    tracker.finish("stopped")
    with pytest.raises(OSError, match="fake did not finish within 3 s and was ended"):
        tracker.wait(3)
    assert took(tmp_path) == ["1", "stopped"]


def test_a_process_that_dies_is_started_again_and_not_for_ever(tmp_path: Path, monkeypatch, caplog) -> None:
    tracker = helper(tmp_path, monkeypatch, "die")
    log = RunLog(tmp_path, {"fake": tracker}, stream=io.StringIO())
    for step in range(1, 41):
        log.step({}, step, 40)
        assert tracker._process is not None
        # A record that reaches a process that has just died is lost with it, and the next process waits for the next one.
        with contextlib.suppress(subprocess.TimeoutExpired):
            tracker._process.wait(1)
    log.close()
    log.wait()
    assert tracker._num_starts == 4 and log._side_work.lost["fake"] >= 2
    assert any("its process has ended" in text for text in warnings(caplog))


def test_a_helper_outlives_a_request_to_stop_and_not_its_rank(tmp_path: Path, monkeypatch) -> None:
    tracker = helper(tmp_path, monkeypatch, "well")
    tracker.start({}, None)
    tracker.metrics(1, {})
    eventually(lambda: took(tmp_path) == ["1"])
    assert tracker._process is not None and tracker._process.stdin is not None
    for asked in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        os.kill(tracker._process.pid, asked)
    tracker.metrics(2, {})
    eventually(lambda: took(tmp_path) == ["1", "2"])
    tracker._process.stdin.close()  # as the end of the rank does
    assert tracker._process.wait(20) == 0 and took(tmp_path)[-1] == "failed"


# ------------------------------------------------------------------------------------- in the helper, without a process


def session(broken: dict[str, Exception], clock: list[float]) -> tuple[process.Session, list[Failing], list[dict[str, str]]]:
    made: list[Failing] = []
    replies: list[dict[str, str]] = []

    def make() -> Any:
        made.append(Failing(""))
        made[-1]._called = lambda name, *details: (  # type: ignore[method-assign]
            (_ for _ in ()).throw(broken[name]) if name in broken else made[-1].took.append((name, *details))
        )
        return made[-1]

    return process.Session(make, lambda reply: replies.append(dict(reply)), lambda: clock[0]), made, replies


def record(step: int) -> dict[str, Any]:
    return {"do": "metrics", "step": step, "values": {}}


def test_a_start_that_fails_is_tried_again_after_a_pause() -> None:
    broken: dict[str, Exception] = {"start": OSError("no route\nto host")}
    clock = [0.0]
    one, made, replies = session(broken, clock)
    one.take({"do": "start", "config": {}, "resumed_step": None})
    one.take(record(1))
    assert len(made) == 1 and replies == [{"lost": "OSError: no route"}] * 2
    broken.clear()
    clock[0] = 1.5
    one.take(record(2))
    assert len(made) == 2 and made[-1].took == [("start", None), ("metrics", 2)] and len(replies) == 2


def test_a_tracker_is_started_anew_after_two_failures_in_a_row() -> None:
    """As when a SIGTERM to all processes of a job has ended the service that wandb starts."""
    broken: dict[str, Exception] = {}
    one, made, replies = session(broken, [0.0])
    one.take({"do": "start", "config": {}, "resumed_step": None})
    for step in range(1, 7):
        broken.update({"metrics": ConnectionResetError("lost")} if step in (1, 3, 4) else {})
        one.take(record(step))
        broken.clear()
    assert len(replies) == 3 and len(made) == 2
    assert made[0].took == [("start", None), ("metrics", 2)] and made[1].took == [("start", None), ("metrics", 5), ("metrics", 6)]


def test_a_reason_is_one_line_without_passwords() -> None:
    assert process.reason_of(OSError("\nno http://me:s3cret@host/x\nmore")) == "OSError: no http://(hidden)@host/x"
    assert process.reason_of(TimeoutError()) == "TimeoutError"


def test_steps_that_a_tracker_has_are_known_after_a_restart(tmp_path: Path) -> None:
    first = TrackedRun(tmp_path, "t")
    assert first.id is None and first.is_new(0)
    first.begin("abc")
    first.given(4)
    again = TrackedRun(tmp_path, "t")
    assert (again.id, again.is_new(4), again.is_new(5)) == ("abc", False, True)
    again.given(5)
    assert again.is_new(5), "more records of the same step"
