"""PPO with a reward model beside the other roles on two ranks: tp 2 beside a policy of tp 2 and a critic of pp 2, with a rule."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megappo.trainer.reward_model import ModelScorer
from tests.trainer.reward_models import scores_of_transformers, write_reward_model
from tests.trainer.small_run import run_many, small_config, write_small_task
from tests.worlds import spawn_world

CENTER, SCALE, WEIGHT, STEPS = -0.2, 0.5, 0.5, 3
JUDGE: dict[str, Any] = {
    "rollout.engine": "megatron",
    "data.prompts_per_step": 8,
    "reward.parts": [{"name": "has_eos"}, {"model": "reward_model", "name": "judge", "weight": WEIGHT}],
    "telemetry.trackers": [],
    "checkpoint.export_at_end": False,
}


def keys_of(judge: Path, **section: Any) -> dict[str, Any]:
    settings = {"model": str(judge), "dtype": "fp32", "center": CENTER, "scale": SCALE, **section}
    return JUDGE | {f"reward_model.{key}": value for key, value in settings.items()}


def run_all(rank: int, folder: Path) -> None:
    """Two layouts of the reward model, a resumed run with another normalisation, and a run in bf16."""
    tp2 = keys_of(folder / "judge", **{"parallel.tp": 2, "micro_batch_tokens": 128})
    other = keys_of(folder / "judge", **{"parallel.pp": 2, "offload.parameters": True})
    bf16 = keys_of(folder / "judge", dtype="bf16")
    with recorded(folder / f"asked{rank}.jsonl"):
        run_many(rank, [(small_config(folder, "tp2", steps=STEPS, **tp2), False)])
    run_many(
        rank, [(small_config(folder, "pp2", steps=STEPS, **other), False), (small_config(folder, "bf16", steps=1, **bf16), False)]
    )
    run_many(rank, [(small_config(folder, "tp2", steps=STEPS + 1, **tp2 | {"reward_model.center": 0.0}), True)])


@contextmanager
def recorded(file: Path) -> Iterator[None]:
    """Write the question, the response and the verdict of every sample that the model scores."""
    scorer = ModelScorer.__call__

    def call(self: ModelScorer, prompts: Any, responses: Any) -> Any:
        verdicts = scorer(self, prompts, responses)
        with file.open("a") as out:
            for prompt, response, verdict in zip(prompts, responses, verdicts):
                out.write(json.dumps([prompt.text, response.text, verdict.parts["raw"], verdict.score]) + "\n")
        return verdicts

    with mock.patch.object(ModelScorer, "__call__", call):
        yield


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("judged")
    write_small_task(folder)
    write_reward_model(folder / "judge", "qwen3")
    spawn_world(run_all, 2, folder)
    return folder


def rows(task: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (task / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def steps(task: Path, name: str) -> list[dict[str, Any]]:
    return [row for row in rows(task, name) if "policy/loss" in row]


def test_the_scores_of_a_run_are_those_of_transformers(task: Path) -> None:
    asked = [json.loads(line) for rank in range(2) for line in (task / f"asked{rank}.jsonl").read_text().splitlines()]
    assert len(asked) == 2 * 20 + STEPS * 16, "two evaluations, and the samples of the steps"
    chats = [[{"role": "user", "content": question}] for question, *_ in asked]
    expected = scores_of_transformers(task / "judge", chats, [response for _, response, *_ in asked])
    assert [raw for *_, raw, _ in asked] == pytest.approx(expected, abs=1e-4)
    assert [value for *_, value in asked] == pytest.approx([(raw - CENTER) / SCALE for raw in expected], abs=1e-3)


def test_the_score_is_made_of_the_model_and_a_rule(task: Path) -> None:
    assert len(steps(task, "tp2")) == STEPS + 1
    for row in steps(task, "tp2"):
        center = CENTER if row["step"] <= STEPS else 0.0  # the resumed run has another
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["reward/judge"] == pytest.approx((row["reward/judge.raw"] - center) / SCALE, abs=1e-5)
        assert row["reward/score_mean"] == pytest.approx(row["reward/has_eos"] + WEIGHT * row["reward/judge"], abs=1e-5)
        assert row["reward/judge.cut"] == 0.0
    assert len({row["reward/judge"] for row in steps(task, "tp2")}) == STEPS + 1


def test_evaluations_ask_the_model_too(task: Path) -> None:
    scored = [row for row in rows(task, "tp2") if "eval/score" in row]
    assert len(scored) == 3
    for row in scored:
        assert row["eval/score"] == pytest.approx(row["eval/has_eos"] + WEIGHT * row["eval/judge"], abs=1e-5)


def test_another_layout_and_offload_change_nothing(task: Path) -> None:
    names = ("reward/judge.raw", "reward/score_mean", "policy/loss", "critic/loss", "kl/per_token")
    for ours, theirs in zip(steps(task, "tp2"), steps(task, "pp2")):
        assert {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, abs=1e-4)
    bf16, fp32 = steps(task, "bf16")[0]["reward/judge.raw"], steps(task, "tp2")[0]["reward/judge.raw"]
    assert bf16 == pytest.approx(fp32, abs=0.1) and bf16 != pytest.approx(fp32, abs=1e-5)


def test_checkpoints_hold_the_trained_models_and_the_identity_of_this_one(task: Path) -> None:
    last = task / "runs" / "tp2" / "checkpoints" / f"step-{STEPS + 1}"
    assert {path.name for path in (last / "megatron").iterdir()} == {"policy", "critic"}
    facts = json.loads((last / "manifest.json").read_text())["facts"]["reward_model"]
    assert facts["model"]["path"] == str(task / "judge") and facts["center"] == 0.0 and facts["scale"] == SCALE
