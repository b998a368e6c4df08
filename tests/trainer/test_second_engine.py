"""Another engine (`tests/engine/toy_engine.py`) runs PPO without a change in megappo/, and gives Megatron's numbers."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from tests.engine.toy_engine import toy_engines
from tests.trainer.small_run import small_config, write_small_task
from tests.worlds import spawn_world

STEPS = 2
# Of one PPO step, and small enough that the tokens drawn are the same.
LOSSES = ("policy/loss", "critic/loss", "policy/grad_norm", "critic/grad_norm", "policy/entropy", "reward/score_mean")
FOURTH = "ema"


def run(folder: Path, name: str, *, resume: bool = False, stop: bool = False, **changes: Any) -> None:
    """One rank, sampled by the policy's own engine; every role in one piece, so that both engines can have it."""
    from megappo.config.loading import load_config
    from megappo.engine.build import MegatronEngines
    from megappo.plan.run import plan_run
    from megappo.resilience.signals import StopRequest
    from megappo.trainer.main import train

    alone = {"run.num_ranks": 1, "policy.parallel": {}, "critic.parallel": {}, "rollout.engine": "megatron"}
    optimizer = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.0, "clip_grad": 0.0}
    alone |= {"policy.optimizer": optimizer, "critic.optimizer": optimizer, "rollout.sampling": {"top_k": 8}}
    config = small_config(folder, name, steps=STEPS, **alone, **changes)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    loaded = load_config(str(path), [])
    asked = StopRequest()
    if stop:
        asked.received = signal.SIGTERM
    engines: Any = MegatronEngines if name == "megatron" else toy_engines
    train(loaded, plan_run(loaded, 1, "cpu", resume=resume).data, resume=resume, stop=asked, engines=engines)


def runs(rank: int, folder: Path) -> None:
    for name in ("megatron", "toy"):
        run(folder, name)
    run(folder, "interrupted", stop=True)
    run(folder, "interrupted", resume=True)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("second")
    write_small_task(folder)
    spawn_world(runs, 1, folder)
    return folder


def rows(task: Path, name: str) -> list[dict[str, Any]]:
    lines = (task / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "policy/loss" in row]


def weights(task: Path, name: str) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(task / "runs" / name / "export").state_dict()


def test_ppo_runs_on_it_with_the_numbers_of_megatron(task: Path) -> None:
    toy, megatron = rows(task, "toy"), rows(task, "megatron")
    assert len(toy) == len(megatron) == STEPS
    for ours, theirs in zip(toy, megatron):
        assert {name: ours[name] for name in LOSSES} == pytest.approx({name: theirs[name] for name in LOSSES}, rel=1e-3, abs=1e-4)


def test_it_learns_and_its_export_is_the_policy(task: Path) -> None:
    before = transformers.AutoModelForCausalLM.from_pretrained(task / "model").state_dict()
    toy, megatron = weights(task, "toy"), weights(task, "megatron")
    for name, tensor in before.items():
        assert torch.allclose(toy[name], megatron[name], atol=2e-4), name
    assert max(float((toy[name] - tensor).abs().max()) for name, tensor in before.items()) > 1e-3


def test_its_checkpoint_resumes_to_the_same_weights(task: Path) -> None:
    whole, resumed = weights(task, "toy"), weights(task, "interrupted")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def four_roles(rank: int, folder: Path) -> list[str]:
    """A role more: a section of the configuration and an entry of the table, and it is built and asked like the others."""
    from unittest import mock

    from megappo.config.schema import ReferenceConfig, TrainConfig
    from megappo.data.packing import pack
    from megappo.trainer import build_roles

    class WithAverage(TrainConfig):
        ema: ReferenceConfig = ReferenceConfig()

    config = WithAverage.model_validate(small_config(folder, "four", steps=1))
    with mock.patch.dict(build_roles.ROLES, {FOURTH: build_roles.ROLES["reference"]}):
        roles = build_roles.build_roles(config, toy_engines(), {"policy": 1, "critic": 1})
    batch = pack([[3, 4, 5], [6, 7]])
    averaged: Any = roles.by_name[FOURTH]
    assert torch.equal(averaged.logprobs(batch)[0], roles.policy.logprobs(batch)[0])
    return [*roles.by_name, *roles.trained_engines]


def test_a_role_is_an_entry_of_the_table(task: Path) -> None:
    assert spawn_world(four_roles, 1, task) == [["policy", "critic", "reference", FOURTH, "policy", "critic"]]
