"""Whole runs of PPO with adapters on Megatron's layers: policy tp 2, critic pp 2, the reference in the policy, real vLLM.

`test_lora_run.py` is about FSDP2 and about what both engines share.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from megappo.config.schema import RolloutConfig
from tests.trainer.small_run import branch_off, run_many, small_config, write_small_task
from tests.worlds import spawn_world

STEPS, MINI_BATCH = 2, 8
LORA = {"rank": 4, "alpha": 8.0}
BOTH = {"policy.lora": LORA, "critic.lora": LORA}
FSDP2 = {"policy.engine": "fsdp2", "critic.engine": "fsdp2", "policy.parallel": {}, "critic.parallel": {}}
VLLM = {"rollout.engine": "vllm", "rollout.kv_cache_gib": 0.03}
SP = {"tp": 2, "sequence_parallel": True}
RUNS: dict[str, dict[str, Any]] = {
    "megatron": BOTH,
    "fsdp2": {**BOTH, **FSDP2},
    "vllm": {**BOTH, **VLLM, "policy.parallel": SP, "policy.recompute": "full"},
    "separate": {**BOTH, **VLLM, "rollout.adapter": "separate"},
    "unmerged": {**BOTH, **VLLM, "rollout.max_prob_diff": 1.0},
    "reference_adapted": BOTH,
}
NUMBERS = (
    "policy/loss",
    "policy/grad_norm",
    "policy/entropy",
    "critic/loss",
    "critic/grad_norm",
    "critic/value_mean",
    "kl/per_token",
)


def unmerged_push() -> Any:
    from megappo.engine.megatron import MegatronEngine

    return mock.patch.object(MegatronEngine, "merged_parameters", MegatronEngine.named_parameters)


def reference_with_adapters() -> Any:
    from megappo.models.lora_linear import ModelAdapters

    return mock.patch.object(ModelAdapters, "off", lambda self: contextlib.nullcontext())


FAULTS: dict[str, Callable[[], Any]] = {"unmerged": unmerged_push, "reference_adapted": reference_with_adapters}


def config_of(folder: Path, name: str, kind: str) -> dict[str, Any]:
    optimizer = {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.01}
    changes: dict[str, Any] = {"rollout.engine": "megatron", "policy.optimizer": optimizer, "critic.optimizer": optimizer}
    changes |= {"algorithm.mini_batch_size": MINI_BATCH, **RUNS[kind]}
    config = small_config(folder, name, steps=STEPS, **changes)
    del config["reference"]  # the policy without its adapters
    return config


def run_all(rank: int, folder: Path) -> None:
    for name in RUNS:
        with FAULTS.get(name, contextlib.nullcontext)():
            run_many(rank, [(config_of(folder, name, name), False)])
    branch_off(folder, "megatron", "interrupted", 1)
    run_many(rank, [(config_of(folder, "interrupted", "megatron"), True)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("megatron_lora")
    write_small_task(folder)
    spawn_world(run_all, 2, folder)
    return folder


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "policy/loss" in row]


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "runs" / name / "export").state_dict()


def test_both_engines_give_the_same_run(folder) -> None:
    ours, theirs = rows(folder, "megatron"), rows(folder, "fsdp2")
    assert len(ours) == len(theirs) == STEPS
    for found, wanted in zip(ours, theirs):
        assert {k: found[k] for k in NUMBERS} == pytest.approx({k: wanted[k] for k in NUMBERS}, rel=1e-4, abs=1e-5)
    assert min(abs(theirs[-1][k]) for k in ("policy/grad_norm", "critic/loss", "kl/per_token")) > 1e-4, "something is compared"
    ours, theirs = weights(folder, "megatron"), weights(folder, "fsdp2")
    before = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert all(torch.allclose(ours[name], theirs[name], atol=2e-4) for name in before)
    assert max(float((ours[name] - tensor).abs().max()) for name, tensor in before.items()) > 1e-3


@pytest.mark.parametrize("name", ["vllm", "separate"])
def test_vllm_samples_with_the_adapters(folder, name: str) -> None:
    """Merged into its weights, or by its own layers."""
    for row in rows(folder, name):
        assert row["rollout/push_verified"] == 1.0
        assert row["rollout/prob_diff_mean"] < 1e-4, "vLLM's probabilities are the policy's"
    assert abs(rows(folder, name)[-1]["kl/per_token"]) > 1e-4, "which are not those of the base"


def test_a_push_without_the_adapters_would_be_noticed(folder) -> None:
    """Negative control: before the first update the adapters change nothing, after it the run would stop by itself."""
    first, last = rows(folder, "unmerged")
    limit = RolloutConfig.model_fields["max_prob_diff"].default
    assert first["rollout/prob_diff_mean"] < 1e-4 and last["rollout/prob_diff_mean"] > limit


def test_a_reference_with_the_adapters_on_would_be_noticed(folder) -> None:
    """Negative control: its KL is 0 to the last step."""
    assert all(abs(row["kl/per_token"]) < 1e-7 for row in rows(folder, "reference_adapted"))
    assert abs(rows(folder, "megatron")[-1]["kl/per_token"]) > 1e-4


def test_a_checkpoint_resumes_to_the_same_bits(folder) -> None:
    whole, resumed = weights(folder, "megatron"), weights(folder, "interrupted")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    last = {name: rows(folder, name)[-1] for name in ("megatron", "interrupted")}
    assert all(last["megatron"][name] == last["interrupted"][name] for name in NUMBERS)
