"""Another engine (`tests/engine/toy_engine.py`) runs PPO without a change in megappo/, and gives Megatron's numbers."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
import yaml

from tests.engine.toy_engine import toy_engines
from tests.trainer.small_run import small_config, write_small_task
from tests.worlds import spawn_world

STEPS = 2
# Of one PPO step of several mini-batches: from the second on the ratios are not 1 and the policy's loss is not near 0.
LOSSES = ("policy/loss", "critic/loss", "policy/grad_norm", "critic/grad_norm", "policy/entropy", "reward/score_mean")
MINI_BATCH = 8
FOURTH = "ema"


def run(folder: Path, name: str, *, resume: bool = False, stop: bool = False, **changes: Any) -> None:
    """One rank, sampled by the policy's own engine; every role in one piece, so that both engines can have it."""
    from megappo.commands.plan.run import plan_run
    from megappo.config.loading import load_config
    from megappo.engine.build import RoleEngines
    from megappo.runtime.ending import StopRequest
    from megappo.trainer.main import train

    alone = {"run.num_ranks": 1, "policy.parallel": {}, "critic.parallel": {}, "rollout.engine": "megatron"}
    optimizer = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.0, "clip_grad": 0.0}
    alone |= {"policy.optimizer": optimizer, "critic.optimizer": optimizer, "rollout.sampling": {"top_k": 8}}
    alone |= {"algorithm.mini_batch_size": MINI_BATCH}
    config = small_config(folder, name, steps=STEPS, **alone, **changes)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    loaded = load_config(str(path), [])
    asked = StopRequest()
    if stop:
        asked.received = signal.SIGTERM
    engines: Any = RoleEngines if name == "megatron" else toy_engines
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
        assert ours["policy/updates"] == 32 // MINI_BATCH
        assert min(abs(theirs[name]) for name in LOSSES) > 1e-3, "a relative tolerance compares something"
        assert {name: ours[name] for name in LOSSES} == pytest.approx({name: theirs[name] for name in LOSSES}, rel=1e-4)


def test_it_learns_and_its_export_is_the_policy(task: Path) -> None:
    before = transformers.AutoModelForCausalLM.from_pretrained(task / "model").state_dict()
    toy, megatron = weights(task, "toy"), weights(task, "megatron")
    for name, tensor in before.items():
        assert torch.allclose(toy[name], megatron[name], atol=2e-4), name
    assert max(float((toy[name] - tensor).abs().max()) for name, tensor in before.items()) > 1e-3


def test_its_checkpoint_resumes_to_the_same_weights(task: Path) -> None:
    whole, resumed = weights(task, "toy"), weights(task, "interrupted")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def alone(rank: int, folder: Path) -> tuple[list[str], list[str]]:
    """The commands that start their own world of one: an export of the interrupted run, and answers of both engines."""
    from megappo.commands.export.export import export_checkpoint
    from megappo.commands.generate.answer import Texts, answer
    from megappo.parallel.device import start_alone

    dist.destroy_process_group()
    export_checkpoint(str(folder / "runs" / "toy"), str(folder / "exported"), role="policy", step=None, engines=toy_engines)
    how: dict[str, Any] = dict(engine="megatron", max_tokens=4, temperature=0.0, dtype="fp32")
    asked = ["1+2=", "7-3="], Texts(False, str(folder / "model" / "tokenizer.model"))
    ours = answer(str(folder / "model"), *asked, **how, engines=toy_engines)
    theirs = answer(str(folder / "model"), *asked, **how)
    start_alone(torch.device("cpu"))  # which the test's world leaves
    return ours, theirs


def test_export_and_generate_take_it(task: Path) -> None:
    [(ours, theirs)] = spawn_world(alone, 1, task)
    assert ours == theirs and len(ours) == 2
    exported, trained = transformers.AutoModelForCausalLM.from_pretrained(task / "exported").state_dict(), weights(task, "toy")
    assert all(torch.equal(exported[name], trained[name]) for name in trained)


def four_roles(rank: int, folder: Path) -> list[str]:
    """A role more: a section of the configuration and an entry of the table, and it is built, asked, planned and recorded."""
    from unittest import mock

    from megappo.commands.plan.estimate import work_out
    from megappo.commands.plan.phases import phases
    from megappo.config import dead_keys
    from megappo.config.loading import validated
    from megappo.config.role_sections import ReferenceConfig
    from megappo.config.schema import TrainConfig
    from megappo.data.packing import pack
    from megappo.trainer import build_roles
    from megappo.trainer.prepare.data import load_run_data
    from megappo.trainer.prepare.layouts import check_layouts, read_archs
    from megappo.trainer.run_facts import run_facts

    class WithAverage(TrainConfig):
        ema: ReferenceConfig = ReferenceConfig(dtype="fp32")

    config = validated(small_config(folder, "four", steps=1), WithAverage)
    with mock.patch.dict(build_roles.ROLES, {FOURTH: build_roles.ROLES["reference"]}):
        roles = build_roles.build_roles(config, toy_engines(), {"policy": 1, "critic": 1})
    batch = pack([[3, 4, 5], [6, 7]])
    averaged: Any = roles.by_name[FOURTH]
    assert torch.equal(averaged.logprobs(batch)[0], roles.policy.logprobs(batch)[0])

    archs = read_archs(config)
    plan = work_out(config, archs, check_layouts(config, archs, 2), 2, "cpu")
    (memory,) = plan.memory[FOURTH]
    assert memory == plan.memory["reference"][0] and memory.resident > 0
    others = [plan.stage(role, 0).resident for role in ("policy", "critic", "reference")]
    assert plan.trainer_at_rest(0) == sum(others) + memory.resident
    assert (f"{FOURTH} log-probs", FOURTH) in [(phase.name, phase.role) for phase in phases(plan, 0)]
    data = load_run_data(config, archs["policy"])
    with mock.patch.dict(dead_keys.RULES, {WithAverage: dead_keys.RULES[TrainConfig]}):  # a class of the test's own
        assert run_facts(config, data)["layouts"][FOURTH]["tp"] == 1
    return [*roles.by_name, *roles.trained_engines]


def test_a_role_is_an_entry_of_the_table(task: Path) -> None:
    assert spawn_world(four_roles, 1, task) == [["policy", "critic", "reference", FOURTH, "policy", "critic"]]
