"""The scripts of examples/ run, and show what they say."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megappo.commands.trajectories.analyse import analyse
from megappo.telemetry.trajectories.read import read_run
from tests.forked_commands import run_command, run_script
from tests.trainer.small_run import small_config, write_small_task

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
TOKEN = "s3same-open-91c4"


def said_by(done: subprocess.CompletedProcess) -> str:
    """Standard output, after a good end."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def this_tree() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


@pytest.fixture(scope="module")
def server():
    """Address of `remote_reward.py`, with the token in this environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RM_TOKEN", TOKEN)
        command = [sys.executable, str(EXAMPLES / "remote_reward.py"), "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, server) -> Path:
    """The directory of a run of two steps with a copy of `user_reward.py` in a fresh folder, on one rank, without vLLM."""
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
            "reward.parts": [
                {"name": "exact_match"},
                {"path": "rewards/mine.py", "function": "close", "weight": 0.5},  # relative to the working directory
                {"path": "rewards/mine.py", "function": "digits", "batch": True, "args": {"wanted": 2}, "weight": 0.25},
                {"url": server, "name": "brief", "weight": 2.0, "remote": {"batch_size": 5, "token_env": "RM_TOKEN"}},
            ],
            "telemetry.trajectories_every": 1,
            "telemetry.trajectories_per_step": 32,  # all
            "algorithm.bootstrap_truncated": False,
        },
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    (folder / "rewards").mkdir()
    (folder / "rewards" / "mine.py").write_text((EXAMPLES / "user_reward.py").read_text())
    said_by(run_command("train", "run.yaml", cwd=folder))
    return folder / "runs" / "mine"


def test_a_step_by_hand_makes_good_tokens_likelier_and_bad_ones_less_likely(trained):
    config = trained.parent.parent / "run.yaml"
    overrides = ("reward.parts=[{name: has_eos}]", "algorithm.ppo_epochs=2")
    out = said_by(run_script(EXAMPLES / "ppo_step_by_hand.py", config, *overrides, cwd=ROOT))
    assert "critic: 4 updates" in out and "policy: 4 updates" in out
    positive, negative = (float(line.rsplit(": ", 1)[1]) for line in out.splitlines()[-2:])
    assert positive > 0 > negative


def test_a_reward_of_ones_own_scores_the_responses(trained):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    names = {"reward/mine.close", "reward/mine.digits", "reward/mine.digits.digits", "reward/mine.digits.others"}
    assert [line["step"] for line in lines if names <= line.keys()] == [1, 2]
    assert any("eval/mine.close" in line for line in lines)
    rows = [json.loads(line) for line in (trained / "trajectories" / "step_000001.jsonl").read_text().splitlines()]
    for row in rows:
        parts = row["parts"]
        assert parts["mine.digits.digits"] == sum(character.isdigit() for character in row["response"])
        assert parts["mine.digits"] == (parts["mine.digits.digits"] == 2)
        own = parts["exact_match"] + 0.5 * parts["mine.close"] + 0.25 * parts["mine.digits"]
        if row["score"] is not None:
            assert row["score"] == pytest.approx(own + 2.0 * parts["brief"])
    assert any(row["parts"]["mine.digits.digits"] for row in rows)


def test_a_server_of_ones_own_scores_the_responses_and_the_token_is_written_nowhere(trained, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from remote_reward import brief

    rows = [json.loads(line) for path in (trained / "trajectories").iterdir() for line in path.read_text().splitlines()]
    for row in rows:
        expected = brief(row)
        if expected is None:
            assert (row["score"], row["reason"]) == (None, "undecided") and "brief" not in row["parts"]
        else:
            assert row["parts"]["brief"] == pytest.approx(expected)
    assert any(row["parts"].get("brief") for row in rows)
    files = [path for path in trained.parent.parent.rglob("*") if path.is_file()]
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    recorded = yaml.safe_load((trained / "config.yaml").read_text())["reward"]["parts"][-1]
    assert recorded["remote"]["token_env"] == "RM_TOKEN", "its name is"


def test_a_trajectory_is_read_and_its_returns_are_those_of_the_run(trained):
    rows = [json.loads(line) for line in (trained / "trajectories" / "step_000002.jsonl").read_text().splitlines()]
    index, sample = next((index, row) for index, row in enumerate(rows) if row["score"] is not None)
    out = said_by(run_script(EXAMPLES / "read_trajectory.py", trained, "--step", "2", "--sample", str(index), cwd=ROOT))
    assert out.startswith("step 2, ")
    # Half a unit of the fifth digit of every reward, twice of every value, and of the return itself.
    largest = max(abs(number) for name in ("reward", "value", "returns") for number in sample[name])
    assert float(out.rsplit("at most ", 1)[1]) < (3 * len(sample["value"]) + 1) * 5e-5 * largest


def test_figures_of_all_samples_of_a_step_are_the_metrics_of_the_run(trained):
    figures = analyse(read_run(trained).trajectories, 1)
    logged = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    names = {
        "score": "reward/score_mean",
        "length": "lengths/response_mean",
        "truncated": "lengths/truncated",
        "kl": "kl/per_response",
    }
    for step, line in zip(figures.steps, [line for line in logged if line["step"] > 0], strict=True):
        assert (step.step, step.samples) == (line["step"], 32 - line.get("reward/no_verdict/undecided", 0))
        # Log-probs of some -3 have an error of 5e-5 in the file, and a response has 6 tokens.
        assert {name: line[metric] for name, metric in names.items()} == pytest.approx(
            {name: getattr(step, name) for name in names}, abs=6e-4
        )
    assert abs(figures.steps[1].kl) > 6e-3, "what is compared is no rounding"


def test_returns_by_hand_are_those_of_gae(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from read_trajectory import returns_by_hand

    sample = {"reward": [0.0, 0.0, 1.0], "value": [0.25, 0.5, 0.75]}
    assert returns_by_hand(sample, 1.0, 1.0) == [1.0, 1.0, 1.0], "without discount: the sum of the rewards to come"
    assert returns_by_hand(sample, 1.0, 0.0) == [0.5, 0.75, 1.0], "one step: reward and the next value"


LIBRARY = """
import sys
from megappo.config.loading import load_config
from megappo.commands.plan.run import plan_run
from megappo.trainer.main import train

config = load_config(sys.argv[1], ["trainer.steps=3"])
train(config, plan_run(config, 1, "cpu", resume=True).data, resume=True)
"""


def test_changed_code_of_a_reward_is_told_on_resume_as_a_library_from_another_directory(trained, tmp_path, monkeypatch):
    """From the run's own record of its configuration, which names the file by its absolute path."""
    mine = trained.parent.parent / "rewards" / "mine.py"
    recorded = yaml.safe_load((trained / "config.yaml").read_text())["reward"]["parts"]
    assert recorded[0] == {"name": "exact_match", "weight": 1.0}
    assert recorded[1] == {"weight": 0.5, "path": str(mine), "function": "close"}
    mine.write_text(mine.read_text() + "# changed\n")
    (tmp_path / "resume.py").write_text(LIBRARY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, str(value))  # as torchrun does
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    done = run_script(tmp_path / "resume.py", trained / "config.yaml", cwd=tmp_path)
    said = said_by(done) + done.stderr
    assert "the code of the reward rule mine.close has changed since step-2: scores may not be comparable" in said
    assert "mine.digits has changed" in said and "exact_match has changed" not in said and "reward.parts changed" not in said
    steps = [json.loads(line).get("step") for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert 3 in steps
