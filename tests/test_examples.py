"""The scripts of examples/ run, and show what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.trainer.small_run import small_config, write_small_task

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def python(*arguments: str | Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "TRITON_INTERPRET"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The directory of a run of two steps that `own_reward.py` has trained, on one rank, without vLLM."""
    folder = tmp_path_factory.mktemp("examples")
    write_small_task(folder)
    config = small_config(
        folder,
        "mine",
        steps=2,
        **{
            "run.num_ranks": 1,
            "policy.parallel": {},
            "critic.parallel": {},
            "rollout.engine": "megatron",
            "reward.parts": [{"name": "exact_match"}, {"name": "close", "weight": 0.5}],
            "telemetry.trajectories_every": 1,
            "algorithm.bootstrap_truncated": False,
        },
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    python(*torchrun, EXAMPLES / "own_reward.py", folder / "run.yaml")
    return folder / "runs" / "mine"


def test_a_step_by_hand_makes_good_tokens_likelier_and_bad_ones_less_likely(trained):
    config = trained.parent.parent / "run.yaml"
    out = python(EXAMPLES / "ppo_step_by_hand.py", config, "reward.parts=[{name: has_eos}]", "algorithm.ppo_epochs=2").stdout
    assert "critic: 4 updates" in out and "policy: 4 updates" in out
    positive, negative = (float(line.rsplit(": ", 1)[1]) for line in out.splitlines()[-2:])
    assert positive > 0 > negative


def test_a_reward_of_ones_own_scores_the_responses(trained):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "reward/close" in line] == [1, 2]
    rows = [json.loads(line) for line in (trained / "trajectories" / "step_000001.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["score"] == pytest.approx(row["parts"]["exact_match"] + 0.5 * row["parts"]["close"])


def test_a_trajectory_is_read_and_its_returns_are_those_of_the_run(trained):
    out = python(EXAMPLES / "read_trajectory.py", trained, "--step", "2", "--sample", "1").stdout
    assert out.startswith("step 2, ")
    assert float(out.rsplit("at most ", 1)[1]) < 1e-5


def test_returns_by_hand_are_those_of_gae(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from read_trajectory import returns_by_hand

    sample = {"reward": [0.0, 0.0, 1.0], "value": [0.25, 0.5, 0.75]}
    assert returns_by_hand(sample, 1.0, 1.0) == [1.0, 1.0, 1.0], "without discount: the sum of the rewards to come"
    assert returns_by_hand(sample, 1.0, 0.0) == [0.5, 0.75, 1.0], "one step: reward and the next value"
