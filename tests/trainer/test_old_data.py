"""Data of older weights than the policy's (`rollout.push_every`), in whole runs with vLLM."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.reliability.compare import MEASURED
from megappo.engine.base import Engine
from megappo.trainer import ppo, rollout_side, training_side
from megappo.trainer.build_roles import Roles
from megappo.trainer.experience.experience import Experience
from tests.trainer.small_run import run_many, set_keys, small_config, write_small_task
from tests.worlds import spawn_world

STEPS, PUSH_EVERY = 7, 3
AGES = [0, 1, 2, 0, 1, 2, 0]


class Values(NamedTuple):
    """Largest |difference| of the values of a step from those of another pass, and of a pass by the critic of the last push."""

    again: float
    old: float


def config_of(folder: Path, name: str, steps: int, **changes: Any) -> dict[str, Any]:
    """One update of policy and critic in a step, so that the ratio of the update is that of the weights before it."""
    config = small_config(folder, name, steps=steps)
    del config["data"]["eval"], config["trainer"]["eval_every"]
    usual = {"rollout.kv_cache_gib": 0.03, "algorithm.mini_batch_size": 32, "checkpoint.export_at_end": False}
    return set_keys(config, {**usual, **changes})


def tis(folder: Path, name: str) -> dict[str, Any]:
    keep = {"checkpoint.save_every": 2, "checkpoint.keep_last": 5}
    return config_of(folder, name, STEPS, **{"rollout.push_every": PUSH_EVERY, "algorithm.importance_sampling.type": "tis", **keep})


def dis(folder: Path) -> dict[str, Any]:
    """Two more steps after those of `tis`."""
    bounds = {"algorithm.loss": {"type": "dis", "low": 0.9, "high": 1.1}}
    return config_of(folder, "dis", STEPS + 2, **{"rollout.push_every": PUSH_EVERY, "checkpoint.save_every": 0, **bounds})


@contextmanager
def values_compared(found: list[Values]) -> Iterator[None]:
    """Runs the passes of stage 4 twice more in every step: as they are, and with the critic's weights at the last push."""
    passes, push, at_push = training_side.add_model_outputs, rollout_side.RolloutSide.push_weights, {}
    run, critics = ppo.PPO.run, []

    def running(self: ppo.PPO) -> Any:
        critics.append(critic_of(self.training.roles))
        return run(self)

    def pushed(self: rollout_side.RolloutSide, version: int) -> dict[str, float]:
        at_push.update({name: weight.detach().clone() for name, weight in critics[-1].named_parameters().items()})
        return push(self, version)

    def compared(experience: Experience, roles: Roles) -> Experience:
        result = passes(experience, roles)
        now = result.batch["value"]
        again = passes(experience, roles).batch["value"]
        weights = {name: weight.detach().clone() for name, weight in critic_of(roles).named_parameters().items()}
        put(critic_of(roles), at_push)
        old = passes(experience, roles).batch["value"]
        put(critic_of(roles), weights)
        found.append(Values(float((again - now).abs().max()), float((old - now).abs().max())))
        return result

    watched = mock.patch.object(rollout_side.RolloutSide, "push_weights", pushed), mock.patch.object(ppo.PPO, "run", running)
    with mock.patch.object(training_side, "add_model_outputs", compared), watched[0], watched[1]:
        yield


def critic_of(roles: Roles) -> Engine:
    return roles.engines["critic"]


def put(engine: Engine, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in engine.named_parameters().items():
            parameter.copy_(weights[name])


class Found(NamedTuple):
    """values: of every step of the run `tis`. printed: what each resumed run printed on this rank, by its name."""

    values: list[Values]
    printed: dict[str, str]


def run_all(rank: int, folder: Path) -> Found:
    values: list[Values] = []
    printed: dict[str, str] = {}
    with values_compared(values):
        run_many(rank, [(tis(folder, "tis"), False)])
    dist.barrier()  # the other rank may still be removing files of its own
    runs = folder / "runs"
    if rank == 0:
        shutil.copytree(runs / "tis", runs / "dis")
        shutil.copytree(runs / "tis", runs / "again")
        for step in (6, 7):  # as if the run had ended after step 4
            shutil.rmtree(runs / "again" / "checkpoints" / f"step-{step}")
    dist.barrier()
    for config in (tis(folder, "again"), dis(folder)):
        with redirect_stdout(io.StringIO()) as text:
            run_many(rank, [(config, True)])
        printed[config["run"]["name"]] = text.getvalue()
    return Found(values, printed)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> tuple[Path, list[Found]]:
    folder = tmp_path_factory.mktemp("old_data")
    write_small_task(folder)
    return folder, spawn_world(run_all, 2, folder)


def rows(task, name: str) -> list[dict[str, Any]]:
    lines = (task[0] / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "policy/loss" in row]


def test_ages_of_the_data_are_told(task) -> None:
    found = rows(task, "tis")
    assert [row["rollout/age_max"] for row in found] == AGES
    assert [row["rollout/age_mean"] for row in found] == AGES
    pushes = [row["step"] for row in found if "rollout/push_seconds" in row]
    assert pushes == [3, 6, STEPS]
    assert [row["rollout/push_version"] for row in found if row["step"] in pushes] == pushes
    texts = [path.read_bytes() for path in (task[0] / "runs" / "tis").rglob("events.out.*")]
    assert any(b"rollout/age_max" in text for text in texts), "TensorBoard shows it"


def test_the_sampler_has_the_weights_of_the_last_push(task) -> None:
    found = rows(task, "tis")
    for row in found:
        difference = row["rollout/prob_diff_mean"]
        assert difference < 1e-4 if row["rollout/age_max"] == 0 else difference > 1e-3
    assert max(row["rollout/prob_diff_mean"] for row in found) > 1e-2, "the default limit, which would have ended the run"
    written = [json.loads(line) for path in (task[0] / "runs" / "tis" / "trajectories").iterdir() for line in path.open()]
    assert written and all(one["version"] == one["step"] - 1 - AGES[one["step"] - 1] for one in written)


def test_the_correction_is_not_1_exactly_where_the_data_is_old(task) -> None:
    for row in rows(task, "tis"):
        apart = max(abs(row["policy/correction_mean"] - 1), abs(row["policy/correction_max"] - 1))
        assert apart < 1e-4 if row["rollout/age_max"] == 0 else apart > 1e-2
        # The decoupled objective: one update starts from the proximal policy, whatever the age.
        assert row["policy/ratio_mean"] == pytest.approx(1, abs=1e-4)


def test_values_of_old_data_are_computed_by_the_critic_of_the_step(task) -> None:
    for found in task[1]:
        for age, one in zip(AGES, found.values, strict=True):
            assert one.again == 0, "values are those of the weights at hand"
            assert one.old == 0 if age == 0 else one.old > 1e-3, "not of those that sampled"


def test_a_checkpoint_that_is_due_between_pushes_waits_and_resumes_to_the_same_bits(task) -> None:
    checkpoints = {path.name for path in (task[0] / "runs" / "tis" / "checkpoints").iterdir() if path.is_dir()}
    assert checkpoints == {"step-3", "step-6", "step-7"}, "save_every is 2"
    whole, resumed = rows(task, "tis"), rows(task, "again")
    assert [row["step"] for row in resumed] == [row["step"] for row in whole]
    for ours, theirs in zip(whole, resumed):
        assert {k: v for k, v in ours.items() if not k.startswith(MEASURED)} == {
            k: v for k, v in theirs.items() if not k.startswith(MEASURED)
        }


def test_dis_leaves_out_tokens_of_old_data_alone(task) -> None:
    """Its ratio is against the sampler: 1 in the one update of a step with new data."""
    new, old = rows(task, "dis")[STEPS:]
    assert new["policy/clip_low"] + new["policy/clip_high"] == 0 and new["policy/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert 0 < old["policy/clip_low"] + old["policy/clip_high"] < 1 and old["policy/ratio_max"] > 1.1
    assert new["policy/grad_norm"] > 0 and old["policy/grad_norm"] > 0


def test_a_checkpoint_between_pushes_starts_with_its_own_weights_and_says_so(task) -> None:
    """The last one of a run, as one of a stop. Step 8 would have been of age 1."""
    assert [row["rollout/age_max"] for row in rows(task, "dis")] == [*AGES, 0, 1]
    printed = task[1][0].printed
    assert "rollout: starts with the weights of step 7; uninterrupted, it would hold those of step 6" in printed["dis"]
    assert "rollout: starts with" not in printed["again"] and "resumed after step 3" in printed["again"]
