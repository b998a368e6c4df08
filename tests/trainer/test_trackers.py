"""A whole run with its trackers: histograms that do not depend on the layout, numbers that do not depend on the trackers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.reliability.compare import VOLATILE
from megappo.algo.summaries import LOG_EDGES
from megappo.telemetry.metrics import Distribution
from tests.telemetry.wandb_files import read_wandb
from tests.trainer.small_run import run_many, small_config, write_small_task
from tests.worlds import spawn_world

STEPS = 4
KEYS: dict[str, Any] = {
    "rollout.engine": "megatron",
    "trainer.eval_before": False,
    "trainer.eval_every": STEPS,
    "checkpoint.save_every": 2,
    "checkpoint.export_at_end": False,
    "telemetry.histograms_every": 1,
    "telemetry.trajectories_every": 2,
    "algorithm.ppo_epochs": 2,
}
REPLICAS = {"policy.parallel.tp": 1, "critic.parallel.pp": 1}
WANDB = {"telemetry.trackers": ["tensorboard", "wandb"]}


def runs(rank: int, folder: Path) -> None:
    """`cut` stops at step 2 and is resumed; `plain` has no tracker, and so no histogram."""
    without = {name: value for name, value in KEYS.items() if name != "telemetry.histograms_every"}
    run_many(
        rank,
        [
            (small_config(folder, "cut", steps=2, **KEYS, **WANDB), False),
            (small_config(folder, "cut", steps=STEPS, **KEYS, **WANDB), True),
            (small_config(folder, "replicas", steps=STEPS, **KEYS, **REPLICAS), False),
            (small_config(folder, "plain", steps=STEPS, **without, **{"telemetry.trackers": []}), False),
        ],
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("trackers")
    write_small_task(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        spawn_world(runs, 2, folder)
    yield folder / "runs"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def histograms(path: Path, name: str) -> list[Any]:
    events = EventAccumulator(str(path / "tensorboard"), size_guidance={"histograms": 0}).Reload()
    return [event.histogram_value for event in events.Histograms(name)]


def test_every_distribution_is_shown_at_every_step(done: Path) -> None:
    tokens = [row["lengths/response_mean"] * 32 for row in rows(done / "cut")]
    for name in Distribution:
        shown = histograms(done / "cut", name.value)
        assert len(shown) == STEPS, name
        per_step = {Distribution.RATIO: [2 * count for count in tokens]}  # two epochs
        per_step |= dict.fromkeys((Distribution.SCORE, Distribution.RESPONSE), [32.0] * STEPS)
        assert [h.num for h in shown] == pytest.approx(per_step.get(name, tokens)), name
        assert all(sum(h.bucket) == h.num and h.min <= h.max == h.bucket_limit[-1] for h in shown)
    scores = histograms(done / "cut", "reward/score")
    assert [h.max for h in scores] == pytest.approx([row["reward/score_max"] for row in rows(done / "cut")])


def test_histograms_do_not_depend_on_the_layout(done: Path) -> None:
    """tp 2 and pp 2 against two replicas: of the second step (in the first, policy and reference differ by rounding alone)."""
    for name in Distribution:
        a, b = (histograms(done / run, name.value)[1] for run in ("cut", "replicas"))
        assert a.num == b.num, name
        if name is Distribution.RATIO:
            counts = [numpy.zeros(len(LOG_EDGES)) for _ in range(2)]
            for full, h in zip(counts, (a, b)):
                for limit, count in zip(h.bucket_limit, h.bucket):
                    full[int(numpy.argmin(numpy.abs(numpy.exp(LOG_EDGES) - limit)))] += count
            # The ratios of a first update are 1 but for rounding; of the others, few are at the border of a bin.
            assert numpy.abs(counts[0] - counts[1]).sum() <= 0.05 * a.num
        else:
            assert a.min == pytest.approx(b.min, abs=1e-4) and a.max == pytest.approx(b.max, abs=1e-4), name
            assert numpy.abs(numpy.array(a.bucket) - numpy.array(b.bucket)).sum() <= 0.05 * a.num, name


def test_trackers_change_no_number(done: Path) -> None:
    """Bit for bit, over a resume too."""
    tracked, plain = rows(done / "cut"), rows(done / "plain")
    names = [name for name in plain[-1] if not name.startswith((*VOLATILE, "eval/"))]
    assert len(names) > 40 and [r["step"] for r in tracked] == [r["step"] for r in plain] == [1, 2, 3, 4]
    assert [{n: r[n] for n in names} for r in tracked] == [{n: r[n] for n in names} for r in plain]
    assert not (done / "plain" / "tensorboard").exists() and not (done / "plain" / "trackers").exists()


def test_the_resumed_run_is_one_run_of_wandb(done: Path) -> None:
    root = done / "cut"
    files = sorted((root / "wandb").glob("offline-run-*/*.wandb"))
    (first, early), (second, late) = (read_wandb(file) for file in files)
    assert first.run_id == second.run_id and first.project == "megappo" and first.display_name == "cut"
    assert sorted(early) == [1, 2] and sorted(late) == [3, 4]
    logged = {**early, **late}
    for row in rows(root):
        there = logged[row["step"]]
        assert {n: v for n, v in row.items() if n not in ("step", "time") and v is not None} == {
            n: v for n, v in there.items() if n in row
        }
    table = json.loads((files[1].parent / "files" / late[4]["trajectories.path"]).read_text())
    sampled = [json.loads(line) for line in (root / "trajectories" / "step_000004.jsonl").read_text().splitlines()]
    assert [row[2:] for row in table["data"]] == [[s["prompt"], s["response"], s["answer"]] for s in sampled]
    config = {item.key: json.loads(item.value_json) for item in second.config.update}
    assert config["trainer"]["steps"] == STEPS and config["policy"]["parallel"]["tp"] == 2
