"""PPO with `engine: fsdp2` for all roles, and mixed with Megatron's: the numbers of the run that is Megatron's alone, checkpoints
that resume to the bit, and the push into vLLM."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from tests.trainer.small_run import NUMBERS, check_same_numbers, small_config, write_small_task
from tests.worlds import spawn_world

STEPS, MINI_BATCH = 2, 8
FSDP2 = {f"{role}.engine": "fsdp2" for role in ("policy", "critic", "reference")} | {"policy.parallel": {}, "critic.parallel": {}}
CUT = {
    **FSDP2,
    "policy.parallel": {"tp": 2, "sequence_parallel": True},
    "critic.parallel": {"cp": 2},
    "reference.parallel": {"tp": 2},
}
RUNS: dict[str, dict[str, Any]] = {
    "megatron": {},
    "fsdp2": FSDP2,
    "mixed": {"critic.engine": "fsdp2", "critic.parallel": {}, "reference.engine": "fsdp2"},
    "cut": CUT,
    "vllm": {**FSDP2, "rollout.engine": "vllm", "rollout.kv_cache_gib": 0.03},
    "vllm-cut": {**CUT, "rollout.engine": "vllm", "rollout.kv_cache_gib": 0.03},
    # Rank 1 has no role but the rollout's: it knows the policy's shards without its engine.
    "placed": {
        **FSDP2,
        "rollout.engine": "vllm",
        "rollout.kv_cache_gib": 0.03,
        "policy.ranks": "0",
        "critic.ranks": "1",
        "reference.ranks": "0",
    },
}


def config_of(folder: Path, name: str, kind: str) -> dict[str, Any]:
    optimizer = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.01}
    changes = {"rollout.engine": "megatron", "policy.optimizer": optimizer, "critic.optimizer": optimizer}
    changes |= {"algorithm.mini_batch_size": MINI_BATCH, **RUNS[kind]}
    return small_config(folder, name, steps=STEPS, **changes)


def run(folder: Path, name: str, kind: str, *, resume: bool = False, stop: bool = False) -> None:
    from megappo.config.loading import load_config
    from megappo.plan.run import plan_run
    from megappo.resilience.signals import StopRequest
    from megappo.trainer.main import train

    rank = torch.distributed.get_rank()
    path = folder / f"{name}.{rank}.yaml"
    path.write_text(yaml.safe_dump(config_of(folder, name, kind)))
    loaded, asked = load_config(str(path), []), StopRequest()
    if stop:
        asked.received = signal.SIGTERM
    train(loaded, plan_run(loaded, 2, "cpu", resume=resume).data, resume=resume, stop=asked)


def run_all(rank: int, folder: Path) -> str:
    """The message of a resume under another engine."""
    for name in RUNS:
        run(folder, name, name)
    run(folder, "interrupted", "fsdp2", stop=True)
    refused = ""
    try:
        run(folder, "interrupted", "megatron", resume=True)
    except ValueError as error:
        refused = str(error)
    run(folder, "interrupted", "fsdp2", resume=True)
    run(folder, "recut", "fsdp2", stop=True)
    run(folder, "recut", "cut", resume=True)
    return refused


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("fsdp2")
    write_small_task(folder)
    return folder, spawn_world(run_all, 2, folder, timeout_s=400)


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "policy/loss" in row]


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "runs" / name / "export").state_dict()


@pytest.mark.parametrize("name", ["fsdp2", "mixed", "cut"])
def test_it_gives_the_losses_of_the_megatron_run(task, name: str) -> None:
    folder, _ = task
    ours, theirs = rows(folder, name), rows(folder, "megatron")
    assert len(ours) == len(theirs) == STEPS
    assert {row["policy/updates"] for row in ours} == {32 // MINI_BATCH}
    check_same_numbers(ours, theirs)
    assert min(abs(theirs[-1][k]) for k in ("policy/loss", "critic/loss", "policy/grad_norm")) > 1e-3, "something is compared"


def test_it_learns_and_its_export_is_the_policy(task) -> None:
    folder, _ = task
    before = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    ours, theirs = weights(folder, "fsdp2"), weights(folder, "megatron")
    assert all(torch.allclose(ours[name], theirs[name], atol=2e-4) for name in before)
    assert max(float((ours[name] - tensor).abs().max()) for name, tensor in before.items()) > 1e-3


def test_a_checkpoint_resumes_to_the_same_bits(task) -> None:
    folder, _ = task
    whole, resumed = weights(folder, "fsdp2"), weights(folder, "interrupted")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    last = {name: rows(folder, name)[-1] for name in ("fsdp2", "interrupted")}
    assert all(last["fsdp2"][name] == last["interrupted"][name] for name in NUMBERS)


def test_a_checkpoint_resumes_in_another_layout(task) -> None:
    """Saved from rows of two data-parallel ranks, read by tensor and context parallel ones, moments too."""
    folder, _ = task
    whole, resumed = weights(folder, "fsdp2"), weights(folder, "recut")
    assert all(torch.allclose(whole[name], resumed[name], atol=2e-4) for name in whole)
    check_same_numbers(rows(folder, "recut")[-1:], rows(folder, "fsdp2")[-1:])


def test_a_resume_under_another_engine_is_refused_in_one_line(task) -> None:
    _, messages = task
    for message in messages:
        assert "does not fit the model" in message and "engine" in message and "\n" not in message


@pytest.mark.parametrize("name", ["vllm", "vllm-cut", "placed"])
def test_vllm_samples_with_the_pushed_weights(task, name: str) -> None:
    folder, _ = task
    for row in rows(folder, name):
        assert row["rollout/push_verified"] == 1.0
        assert row["rollout/prob_diff_mean"] < 1e-4, "vLLM's probabilities are the policy's"
