"""A reward server that fails one request in ten at random: the model learns what it learns without failures, and all responses are
trained on or left out by reason."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.faulty_server import serving
from tests.rewards.flaky_server import FAILING, FlakyServer
from tests.trainer.small_run import run_many, set_keys, small_config, write_small_task
from tests.worlds import spawn_world

STEPS, SAMPLES, TOKENS = 9, 64, 6  # after six it depends on which requests fail whether all is learned
WITHIN = 0.02  # of a score from 0 to 1


def share_of_ones(sample: dict[str, Any]) -> float:
    return sample["response"].count("1") / TOKENS


class Ones(FlakyServer):
    score = staticmethod(share_of_ones)


OWN = f"def ones(sample): return sample.response.count('1') / {TOKENS}\n"


def config_of(folder: Path, name: str, part: dict[str, Any]) -> dict[str, Any]:
    """The policy learns to say nothing but one digit, in steps enough to do so."""
    config = small_config(folder, name, steps=STEPS)
    del config["reference"]
    changes = {
        "rollout.engine": "megatron",
        "policy.optimizer.lr": 3e-3,
        "rollout.samples_per_prompt": SAMPLES // 16,
        "reward": {"parts": [part]},
        "algorithm.kl": {"placement": "none"},
        "trainer.eval_every": STEPS,
        "checkpoint.export_at_end": False,
        "telemetry": {"trajectories_every": 1, "trajectories_per_step": SAMPLES},
    }
    return set_keys(config, changes)


def run_both(rank: int, folder: Path, url: str) -> None:
    flaky = {"name": "rm", "url": url, "remote": {"batch_size": 2, "retry_budget_s": 0.0}}
    for name, part in (("whole", {"path": str(folder / "mine.py"), "function": "ones"}), ("flaky", flaky)):
        run_many(rank, [(config_of(folder, name, part), False)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flaky")
    write_small_task(folder)
    (folder / "mine.py").write_text(OWN)
    with serving(make=Ones) as server:
        spawn_world(run_both, 2, folder, server.url)
    return folder


def rows_of(folder: Path, name: str, key: str) -> list[dict[str, Any]]:
    """Lines of a run's metrics that have this one."""
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if key in row]


def test_the_score_on_held_out_prompts_is_that_without_failures(folder: Path) -> None:
    found = {name: [row["eval/score"] for row in rows_of(folder, name, "eval/score")] for name in ("whole", "flaky")}
    before, after = ({name: scores[at] for name, scores in found.items()} for at in (0, -1))
    assert max(before.values()) < 0.2 and min(after.values()) > 0.9, "both have learned"
    assert after["flaky"] == pytest.approx(after["whole"], abs=WITHIN)


def test_what_was_generated_was_trained_on_or_left_out_by_reason(folder: Path) -> None:
    reasons = Counter[str]()
    for step, row in enumerate(rows_of(folder, "flaky", "policy/updates"), 1):
        file = folder / "runs" / "flaky" / "trajectories" / f"step_{step:06}.jsonl"
        trained = sum("advantage" in json.loads(line) for line in file.read_text().splitlines())
        left_out = {key.rpartition("/")[2]: value for key, value in row.items() if key.startswith("reward/no_verdict/")}
        assert trained + sum(left_out.values()) == SAMPLES and row["reward/without_verdict"] == 1 - trained / SAMPLES
        reasons.update(left_out)
    assert set(reasons) == {"unreachable"} and 0.5 * FAILING < reasons.total() / (STEPS * SAMPLES) < 2 * FAILING
    assert not [key for row in rows_of(folder, "whole", "policy/updates") for key in row if key.startswith("reward/no_verdict/")]
