"""PPO with a reward model beside the other roles on two ranks: tp 2 beside a policy of tp 2 and a critic of pp 2, with a rule."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megappo.models.flops import forward_flops
from megappo.models.hf_config import read_arch
from megappo.trainer.reward_model import ModelScorer
from tests.trainer.reward_models import scores_of_transformers, write_reward_model
from tests.trainer.small_run import run_many, small_config, write_small_task
from tests.worlds import spawn_world

CENTER, SCALE, WEIGHT, STEPS = -0.2, 0.5, 0.5, 2
SUFFIX = "0="
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
    """Two layouts of the reward model, the other engine, a resumed run with another normalisation, and one in bf16 beside vLLM."""
    tp2 = keys_of(folder / "judge", **{"parallel.tp": 2, "micro_batch_tokens": 128})
    other = keys_of(folder / "judge", **{"parallel.pp": 2, "offload": ["parameters"]})
    vllm = keys_of(folder / "judge", dtype="bf16") | {"rollout.engine": "vllm"}
    terse = {"terse": {"data": str(folder / "data" / "eval.jsonl"), "prompt_suffix": SUFFIX}}
    with recorded(folder / f"asked{rank}.jsonl"):
        run_many(rank, [(small_config(folder, "tp2", steps=STEPS, **tp2), False)])
    with recorded(folder / f"suffixed{rank}.jsonl"):
        run_many(rank, [(small_config(folder, "pp2", steps=STEPS, evaluations=terse, **other), False)])
    sharded = keys_of(folder / "judge", engine="fsdp2", offload=["parameters"])
    with recorded(folder / f"sharded{rank}.jsonl"):
        run_many(rank, [(small_config(folder, "fsdp2", steps=STEPS, **sharded), False)])
    run_many(rank, [(small_config(folder, "tp2", steps=STEPS + 1, **tp2 | {"reward_model.center": 0.0}), True)])
    with recorded(folder / f"sampled{rank}.jsonl"):
        run_many(rank, [(small_config(folder, "vllm", steps=STEPS, **vllm), False)])


@contextmanager
def recorded(file: Path) -> Iterator[None]:
    """Write the question, the response, the number of the call, the tokens read and the verdict of every sample that the model
    scores."""
    scorer, calls = ModelScorer.__call__, itertools.count()

    def call(self: ModelScorer, prompts: Any, responses: Any) -> Any:
        verdicts = scorer(self, prompts, responses)
        number = next(calls)
        with file.open("a") as out:
            for prompt, response, verdict in zip(prompts, responses, verdicts):
                length = len(self.text.encode(prompt, response.text))
                out.write(json.dumps([prompt.text, response.text, number, length, verdict.parts["raw"], verdict.score]) + "\n")
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


def asked(task: Path, name: str = "asked") -> list[list[Any]]:
    return [json.loads(line) for rank in range(2) for line in (task / f"{name}{rank}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("run", ["asked", "sharded"])
def test_the_scores_of_a_run_are_those_of_transformers(task: Path, run: str) -> None:
    samples = asked(task, run)
    assert len(samples) == 2 * 20 + STEPS * 16, "two evaluations, and the samples of the steps"
    chats = [[{"role": "user", "content": question}] for question, *_ in samples]
    expected = scores_of_transformers(task / "judge", chats, [response for _, response, *_ in samples])
    assert [raw for *_, raw, _ in samples] == pytest.approx(expected, abs=1e-4)
    assert [value for *_, value in samples] == pytest.approx([(raw - CENTER) / SCALE for raw in expected], abs=1e-3)


def test_the_reward_model_under_fsdp2_gives_the_same_step(task: Path) -> None:
    """The first: the policy samples the same then, and later ones differ by rounding that its updates magnify."""
    found, wanted = (steps(task, name)[0] for name in ("fsdp2", "tp2"))
    for name in ("policy/loss", "critic/loss", "policy/grad_norm", "reward/judge", "reward/score_mean"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name
    assert len(steps(task, "fsdp2")) == STEPS


def test_the_score_is_made_of_the_model_and_a_rule(task: Path) -> None:
    assert len(steps(task, "tp2")) == STEPS + 1
    for row in steps(task, "tp2"):
        center = CENTER if row["step"] <= STEPS else 0.0  # the resumed run has another
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["reward/judge"] == pytest.approx((row["reward/judge.raw"] - center) / SCALE, abs=1e-5)
        assert row["reward/score_mean"] == pytest.approx(row["reward/has_eos"] + WEIGHT * row["reward/judge"], abs=1e-5)
        assert row["reward/judge.cut"] == 0.0
    assert len({row["reward/judge"] for row in steps(task, "tp2")}) == STEPS + 1


def test_its_operations_are_those_of_the_texts_that_all_ranks_read(task: Path) -> None:
    arch = read_arch(task / "judge")
    for row in steps(task, "tp2")[:STEPS]:
        lengths = torch.tensor([length for _, _, call, length, *_ in asked(task) if call == row["step"]])  # call 0: an evaluation
        assert len(lengths) == 16
        expected = forward_flops(arch, lengths, value_head=True).total / 1e12
        assert row["perf/work_tflop/score/reward_model"] == pytest.approx(expected)
        seconds = 2 * row["timing/score_s"]  # of both ranks
        assert row["perf/tflops/score"] == pytest.approx(expected / seconds)
        assert row["perf/tokens_per_s/score"] == pytest.approx(int(lengths.sum()) / seconds)


def test_evaluations_ask_the_model_too(task: Path) -> None:
    scored = [row for row in rows(task, "tp2") if "eval/score" in row]
    assert len(scored) == 3
    for row in scored:
        assert row["eval/score"] == pytest.approx(row["eval/has_eos"] + WEIGHT * row["eval/judge"], abs=1e-5)


def test_a_set_with_another_suffix_is_read_with_it(task: Path) -> None:
    samples = asked(task, "suffixed")
    last = max(call for _, _, call, *_ in samples)
    of_set = {1, last}  # after data.eval, before the steps and at the end
    chats = [[{"role": "user", "content": question + SUFFIX * (call in of_set)}] for question, _, call, *_ in samples]
    expected = scores_of_transformers(task / "judge", chats, [response for _, response, *_ in samples])
    assert [raw for *_, raw, _ in samples] == pytest.approx(expected, abs=1e-4)
    assert last == 2 + STEPS + 1 and sum(call in of_set for _, _, call, *_ in samples) == 2 * 20
    bare = [{"role": "user", "content": samples[-1][0]}]
    with_it, without = scores_of_transformers(task / "judge", [chats[-1], bare], [samples[-1][1], samples[-1][1]])
    assert with_it != pytest.approx(without, abs=1e-3), "the suffix is seen in the score"


def test_another_layout_and_offload_change_nothing(task: Path) -> None:
    names = ("reward/judge.raw", "reward/score_mean", "policy/loss", "critic/loss", "kl/per_token")
    for ours, theirs in zip(steps(task, "tp2"), steps(task, "pp2")):
        assert {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, abs=1e-4)


def test_what_vllm_samples_is_scored_too_and_bf16_only_rounds(task: Path) -> None:
    samples = asked(task, "sampled")
    chats = [[{"role": "user", "content": question}] for question, *_ in samples]
    expected = scores_of_transformers(task / "judge", chats, [response for _, response, *_ in samples])
    raw = [raw for *_, raw, _ in samples]
    assert raw == pytest.approx(expected, abs=0.1) and raw != pytest.approx(expected, abs=1e-5)
    assert len(steps(task, "vllm")) == STEPS
    for row in steps(task, "vllm"):
        of_step = [value for *_, call, _, value, _ in samples if call == row["step"]]
        assert row["reward/judge.raw"] == pytest.approx(sum(of_step) / len(of_step), abs=1e-5) and len(of_step) == 16
        assert row["reward/score_mean"] == pytest.approx(row["reward/has_eos"] + WEIGHT * row["reward/judge"], abs=1e-5)
        assert row["policy/grad_norm"] > 0 and row["rollout/push_verified"] > 0


def test_checkpoints_hold_the_trained_models_and_the_identity_of_this_one(task: Path) -> None:
    last = task / "runs" / "tp2" / "checkpoints" / f"step-{STEPS + 1}"
    assert {path.name for path in (last / "models").iterdir()} == {"policy", "critic"}
    facts = json.loads((last / "manifest.json").read_text())["facts"]["reward_model"]
    assert facts["model"]["path"] == str(task / "judge") and facts["center"] == 0.0 and facts["scale"] == SCALE
