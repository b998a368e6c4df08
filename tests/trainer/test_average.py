"""The moving average of the policy: against a plain loop under both engines, in the policy's place, in runs that are resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megappo.algo.objectives import steered
from megappo.checkpoint.shards import StoredTensors
from megappo.checkpoint.state import StateBox
from megappo.commands.export.export import export_checkpoint
from megappo.commands.plan.activations import RoleWork
from megappo.commands.plan.memory import count_parameters, role_memory, with_average
from megappo.models.hf_config import read_arch
from megappo.parallel.layout import ParallelLayout
from megappo.rewards.compose import Scored
from megappo.trainer import extras, rollout_side
from tests.trainer.averages import POLICIES, REFERENCES, Found, averages, write_models
from tests.trainer.small_run import bare, branch_off, run_many, set_keys, small_config, write_small_task
from tests.worlds import spawn_world


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def found(models: Path) -> dict[str, Found]:
    return spawn_world(averages, 2, write_models(models))[0]


@pytest.mark.parametrize("name", POLICIES)
def test_it_is_the_loop_over_the_weights_of_successive_steps(found: dict[str, Found], name: str) -> None:
    one = found[name]
    # Weights of order 0.1 that move by 0.01 in an update; of the sharded bf16 one the oracle has no main parameters.
    loop = found["megatron dp2 bf16, not sharded"].loop if name == "megatron dp2 bf16" else one.loop
    for tensor, values in one.average.items():
        torch.testing.assert_close(values, loop[tensor], rtol=0, atol=2e-6)
    assert one.waits


def test_it_is_of_fp32_weights_where_the_model_has_bf16_ones(found: dict[str, Found]) -> None:
    """Negative control: the loop over the rounded weights is far off."""
    one = found["megatron dp2 bf16"]
    worst = max(float((values - one.loop[name]).abs().max()) for name, values in one.average.items())
    assert worst > 1e-4


@pytest.mark.parametrize("name", [name for name in POLICIES if name.startswith("megatron")])
def test_the_plan_counts_its_bytes(models: Path, found: dict[str, Found], name: str) -> None:
    arch = read_arch(str(models / ("tied" if "tied" in name else "llama")))
    layout = ParallelLayout(2, **POLICIES[name].get("parallel", {}))
    stage = layout.coordinates(0).pp
    sizes = {"dtype": POLICIES[name].get("dtype", "fp32"), "trained": True, "micro_batch_tokens": 1, "num_micro_batches": 1}
    bare, count = role_memory(arch, layout, stage, RoleWork(**sizes)), count_parameters(arch, layout, stage)
    device, host = (with_average(bare, count, layout, on_device=on, swaps=False) for on in (True, False))
    assert device.average == host.average_on_host == found[name].num_bytes
    assert device.held - bare.held == device.resident - bare.resident == found[name].num_bytes and host.held == bare.held
    assert device.written - bare.written == device.written_weights - bare.written_weights > 0


@pytest.mark.parametrize("name", POLICIES)
def test_in_place_it_is_the_policy_and_then_nothing_has_changed(found: dict[str, Found], name: str) -> None:
    one = found[name]
    for tensor, values in one.placed.items():
        average = one.average[tensor]
        assert torch.equal(values, average.bfloat16().float() if "bf16" in name else average)
    assert one.restored


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_of_another_layout_or_engine_gets_every_tensor(found: dict[str, Found], name: str) -> None:
    """Of the policy, then of its average; before that the reference is the model's file."""
    before, *refreshed = found[name].references
    assert any(not torch.equal(before[0][tensor], values) for tensor, values in before[1].items()), "the policy has moved"
    for now, wanted in refreshed:
        assert now.keys() == wanted.keys()
        assert all(torch.equal(now[tensor], values) for tensor, values in wanted.items())
    (one, _), (other, _) = refreshed
    assert any(not torch.equal(one[tensor], other[tensor]) for tensor in one), "negative control: the average is not the policy"


# ------------------------------------------------------------------------------------------------------------------- runs

STEPS, DECAY = 3, 0.5
ENGINES = {"megatron": {"policy.parallel": {"tp": 2}}, "fsdp2": {"policy.engine": "fsdp2", "policy.parallel": {}}}

COMPARED = ("policy/entropy_coef", "policy/positive_nll", "policy/ptx_loss", "policy/loss", "policy/entropy", "policy/grad_norm")
PTX_DATA = "algorithm.ptx.data"
PTX = {
    "algorithm.ptx.coef": 0.5,
    PTX_DATA: "",  # a file of the task, see `config_of`
    "algorithm.ptx.text_key": "prompt",
    "algorithm.ptx.max_tokens": 8,
    "algorithm.ptx.batch_size": 3,
}
STEERED = {
    "algorithm.entropy.type": "target",
    "algorithm.entropy.target": 3.0,  # between the entropies of the first steps, of 32 tokens
    "algorithm.positive_nll.coef": 0.5,
    "algorithm.positive_nll.score": 0.5,
    **PTX,
}

WITHOUT = {"policy.ema": None}
REFRESHED = {
    **WITHOUT,
    "algorithm.kl": {"coef": 0.01},
    "reference": {"dtype": "fp32", "parallel": {"tp": 2}, "refresh": {"every": 2}, "offload": ["parameters"]},
}
FROM_EMA = {
    "algorithm.kl": {"coef": 0.01},
    "reference": {"engine": "fsdp2", "dtype": "fp32", "refresh": {"above_kl": 1e-3, "source": "ema"}},
    **PTX,
}


EVALUATED = (*ENGINES, "faulty")


def config_of(folder: Path, name: str, engine: str, steps: int = STEPS, **changes: Any) -> dict[str, Any]:
    """Without critic and reference; `EVALUATED` runs evaluate the average at every step."""
    changes = {key: str(folder / "data" / "sft.jsonl") if key == PTX_DATA else value for key, value in changes.items()}
    config = bare(small_config(folder, name, steps=steps))
    if name in EVALUATED:
        set_keys(
            config, {"data.eval": str(folder / "data" / "eval.jsonl"), "trainer.evaluate_with": "ema", "trainer.eval_every": 1}
        )
    del config["critic"], config["reference"], config["algorithm"]["bootstrap_truncated"]
    usual = {
        "algorithm.estimator": "rloo",
        "algorithm.kl": {"placement": "none"},
        "rollout.engine": "megatron",
        "policy.ema": {"decay": DECAY},
        "checkpoint": {"save_every": 1, "keep_last": STEPS, "export_at_end": False},
        "telemetry": {"trackers": [], "trajectories_every": 0},
    }
    return set_keys(config, {**usual, **ENGINES[engine], **changes})


@contextmanager
def unscored_step(step: int) -> Iterator[None]:
    """The rules decide nothing about the responses of this step."""
    plain, calls = rollout_side.score_responses, []

    def scored(*arguments: Any) -> Scored:
        found = plain(*arguments)
        calls.append(None)
        return found.without(dict.fromkeys(range(len(found.total)), "undecided")) if len(calls) == step else found

    with mock.patch.object(rollout_side, "score_responses", scored):
        yield


def run_all(rank: int, folder: Path) -> str:
    """Whole and resumed runs of both engines, and one whose average stays in the sampler: its error."""
    with mock.patch.object(extras, "ENTROPY_STEP", 0.25):  # a change that is seen in a few steps
        for engine in ENGINES:
            run_many(rank, [(config_of(folder, engine, engine, **STEERED), False)])
            branch_off(folder, engine, f"{engine}-resumed", STEPS - 1)
            run_many(rank, [(config_of(folder, f"{engine}-resumed", engine, **STEERED), True)])
    run_many(rank, [(config_of(folder, "refreshed", "megatron", **REFRESHED), False)])
    branch_off(folder, "refreshed", "refreshed-resumed", STEPS - 1)
    run_many(rank, [(config_of(folder, "refreshed-resumed", "megatron", **REFRESHED), True)])
    for steps, resume in ((STEPS - 1, False), (STEPS, True)):  # the policy's engine is not the reference's
        run_many(rank, [(config_of(folder, "from-ema", "megatron", steps, **FROM_EMA), resume)])
    with unscored_step(2):
        run_many(rank, [(config_of(folder, "unscored", "megatron", **WITHOUT, **{"reward.max_without_verdict": 1.0}), False)])
    # A checkpoint without an average, and under the other engine.
    branch_off(folder, "unscored", "late", 1)
    run_many(rank, [(config_of(folder, "late", "fsdp2", 2), True)])
    plain = rollout_side.RolloutSide.push_weights

    def push(self: rollout_side.RolloutSide, version: int) -> dict[str, float]:
        return {} if version == 1 else plain(self, version)  # neither after the updates of step 1 nor after its evaluation

    with mock.patch.object(rollout_side.RolloutSide, "push_weights", push):
        try:
            run_many(rank, [(config_of(folder, "faulty", "megatron"), False)])
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("runs")
    write_small_task(folder)
    return folder, spawn_world(run_all, 2, folder)[0]


def stored(folder: Path, run: str, step: int, role: str) -> dict[str, Tensor]:
    """Tensors of a model in a checkpoint as its files have them, as matrices."""
    tensors = StoredTensors(folder / "runs" / run / "checkpoints" / f"step-{step}" / "models" / role)
    found = {name: torch.empty(shape) for name, shape in tensors.shapes.items() if not name.startswith("optimizer.")}
    tensors.fill(StateBox(name, 0, 0, values) for name, values in found.items())
    return found


def steps_of(folder: Path, run: str) -> list[dict[str, Any]]:
    """Metrics of the steps, without those of validations before the first."""
    rows = [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "policy/updates" in row]


def export(rank: int, folder: Path, run: str, role: str, step: int) -> None:
    torch.distributed.destroy_process_group()  # it makes its own
    export_checkpoint(str(folder / "runs" / run), str(folder / f"{run}-{role}-{step}"), role=role, step=step)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def test_the_average_of_a_run_is_the_loop_over_its_checkpoints(runs: tuple[Path, str]) -> None:
    """Those of fsdp2 hold Hugging Face tensors as they are, the start is the model's file."""
    folder, _ = runs
    loop = {name: values.view((*values.shape, 1)[:2]) for name, values in load_file(folder / "model" / "model.safetensors").items()}
    for step in range(1, STEPS + 1):
        now = stored(folder, "fsdp2", step, "policy")
        assert any(not torch.equal(now[name], loop[name]) for name in loop), "the policy has moved"
        loop = {name: DECAY * loop[name] + (1 - DECAY) * now[name] for name in loop}
        average = stored(folder, "fsdp2", step, "ema")
        assert average.keys() == loop.keys()
        for name, values in average.items():
            torch.testing.assert_close(values, loop[name], rtol=0, atol=1e-6)
            # The other engine has the same weights up to the rounding of its sums, and Adam's division by small gradients.
            torch.testing.assert_close(stored(folder, "megatron", step, "ema")[name], values, rtol=0, atol=2e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_resumed_run_has_the_average_to_the_bit(runs: tuple[Path, str], engine: str) -> None:
    folder, _ = runs
    whole, resumed = (stored(folder, name, STEPS, "ema") for name in (engine, f"{engine}-resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    before = stored(folder, engine, STEPS - 1, "ema")
    assert any(not torch.equal(whole[name], before[name]) for name in whole), "negative control: it moves"
    scores = [json.loads(line).get("eval/score") for line in (folder / "runs" / engine / "metrics.jsonl").read_text().splitlines()]
    assert len([score for score in scores if score is not None]) >= STEPS


def test_a_checkpoint_without_an_average_starts_one_from_its_policy(runs: tuple[Path, str]) -> None:
    folder, _ = runs
    first, second = stored(folder, "late", 1, "policy"), stored(folder, "late", 2, "policy")
    average = stored(folder, "late", 2, "ema")
    name = "model.norm.weight"
    before = first.get(name, first["decoder.final_layernorm.weight"] if name not in first else None)
    torch.testing.assert_close(average[name], DECAY * before + (1 - DECAY) * second[name], rtol=0, atol=1e-6)


def test_the_average_in_the_sampler_ends_the_next_step(runs: tuple[Path, str]) -> None:
    _, message = runs
    assert message == "step 2: megatron sampled with the weights of the average after step 1, not with the policy's of step 1"


def test_export_writes_the_average(runs: tuple[Path, str]) -> None:
    folder, _ = runs
    spawn_world(export, 1, folder, "megatron", "ema", STEPS)
    exported, average = load_file(folder / f"megatron-ema-{STEPS}" / "model.safetensors"), stored(folder, "megatron", STEPS, "ema")
    assert exported.keys() == average.keys()
    assert all(torch.equal(values.view_as(average[name]), average[name]) for name, values in exported.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_the_steered_bonus_and_the_losses_of_correct_responses_and_of_texts_resume_to_the_bit(
    runs: tuple[Path, str], engine: str
) -> None:
    folder, _ = runs
    whole, resumed = (steps_of(folder, name) for name in (engine, f"{engine}-resumed"))
    coef = 0.0
    for one, other in zip(whole, resumed, strict=True):
        assert [one[name] for name in COMPARED] == [other[name] for name in COMPARED]
        acting, coef = steered(coef, one["policy/entropy"], 3.0, 0.25)
        assert one["policy/entropy_coef"] == acting
        assert one["policy/positive_nll"] > 0 and one["policy/ptx_loss"] > 0
    assert coef > 0, "negative control: it has moved"


def test_a_reference_is_refreshed_and_resumes_to_the_bit(runs: tuple[Path, str]) -> None:
    folder, _ = runs
    whole, resumed = (steps_of(folder, name) for name in ("refreshed", "refreshed-resumed"))
    divergence = [row["kl/per_response"] for row in whole]
    assert divergence[0] == pytest.approx(0, abs=1e-6) and divergence[2] == pytest.approx(0, abs=1e-6), "just copied"
    assert abs(divergence[1]) > 1e-3, "negative control: a step after which nothing is copied"
    for one, other in zip(whole, resumed, strict=True):
        assert all(one[name] == other[name] for name in ("kl/per_response", "policy/loss", "policy/grad_norm"))
    for step, is_copy in ((1, False), (2, True), (3, False)):
        policy, reference = (stored(folder, "refreshed", step, role) for role in ("policy", "reference"))
        assert all(torch.equal(policy[name], reference[name]) for name in reference) == is_copy


def test_a_reference_follows_the_average_once_its_kl_is_above_the_limit(runs: tuple[Path, str]) -> None:
    folder, _ = runs
    wanted = load_file(folder / "model" / "model.safetensors")
    above = []
    for step, row in enumerate(steps_of(folder, "from-ema"), 1):
        reference, average = (stored(folder, "from-ema", step, role) for role in ("reference", "ema"))
        above.append(row["kl/per_response"] > 1e-3)
        wanted = average if above[-1] else wanted
        assert all(torch.equal(reference[name], wanted[name].view_as(reference[name])) for name in reference)
    assert not above[0] and any(above)


def test_texts_are_learnt_beside_the_responses_and_counted(runs: tuple[Path, str]) -> None:
    """Of 6 to 12 tokens, none of which a step's own counts have."""
    folder, _ = runs
    with_texts, without = steps_of(folder, "from-ema"), steps_of(folder, "refreshed")
    losses = [row["policy/ptx_loss"] for row in with_texts]
    assert losses[-1] < losses[0] and "policy/ptx_loss" not in without[0]
    first, plain = with_texts[0], without[0]
    assert first["lengths/response_mean"] == plain["lengths/response_mean"]
    assert first["perf/work_tflop/update_policy/policy"] > plain["perf/work_tflop/update_policy/policy"]


def test_a_step_without_a_reward_updates_nothing_and_the_run_goes_on(runs: tuple[Path, str]) -> None:
    folder, _ = runs
    assert [row["policy/updates"] > 0 for row in steps_of(folder, "unscored")] == [True, False, True]
    first, second, third = (stored(folder, "unscored", step, "policy") for step in range(1, STEPS + 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(second[name], third[name]) for name in first)
