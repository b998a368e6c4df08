"""The moving average of the policy: against a plain loop under both engines, in the policy's place, in runs that are resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megappo.checkpoint.stored import StoredBox, StoredTensors
from megappo.models.hf_config import read_arch
from megappo.parallel.layout import ParallelLayout
from megappo.plan.memory import count_parameters, role_memory, with_average
from megappo.trainer.export import export_checkpoint
from tests.trainer.averages import POLICIES, Found, averages, write_models
from tests.trainer.small_run import run_many, set_keys, small_config, write_small_task
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
    bare, count = role_memory(arch, layout, stage, **sizes), count_parameters(arch, layout, stage)
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


# ------------------------------------------------------------------------------------------------------------------- runs

STEPS, DECAY = 3, 0.5
ENGINES = {"megatron": {"policy.parallel": {"tp": 2}}, "fsdp2": {"policy.engine": "fsdp2", "policy.parallel": {}}}


def config_of(folder: Path, name: str, engine: str, steps: int = STEPS, **changes: Any) -> dict[str, Any]:
    """Without critic and reference; the average is evaluated at every step."""
    config = small_config(folder, name, steps=steps)
    del config["critic"], config["reference"], config["algorithm"]["bootstrap_truncated"]
    usual = {
        "algorithm.estimator": "rloo",
        "algorithm.kl": {"placement": "none"},
        "rollout.engine": "megatron",
        "policy.ema": {"decay": DECAY},
        "trainer.evaluate_with": "ema",
        "trainer.eval_every": 1,
        "checkpoint": {"save_every": 1, "keep_last": STEPS, "export_at_end": False},
        "telemetry": {"trajectories_every": 0},
    }
    return set_keys(config, {**usual, **ENGINES[engine], **changes})


def run_all(rank: int, folder: Path) -> str:
    """Whole and resumed runs of both engines, and one whose average stays in the sampler: its error."""
    from unittest import mock

    from megappo.trainer.ppo import PPO

    for engine in ENGINES:
        run_many(rank, [(config_of(folder, engine, engine), False)])
        first = config_of(folder, f"{engine}-resumed", engine, steps=STEPS - 1)
        run_many(rank, [(first, False), (config_of(folder, f"{engine}-resumed", engine), True)])
    # A checkpoint without an average, and under the other engine.
    run_many(rank, [(config_of(folder, "late", "megatron", 1, **{"policy.ema": None, "trainer.evaluate_with": "policy"}), False)])
    run_many(rank, [(config_of(folder, "late", "fsdp2", 2), True)])
    plain = PPO.push_weights

    def push(self: PPO, version: int) -> dict[str, float]:
        return {} if version == 1 else plain(self, version)  # neither after the updates of step 1 nor after its evaluation

    with mock.patch.object(PPO, "push_weights", push):
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
    tensors = StoredTensors(folder / "runs" / run / "checkpoints" / f"step-{step}" / "megatron" / role)
    found = {name: torch.empty((*shape, 1)[:2]) for name, shape in tensors.shapes.items() if not name.startswith("optimizer.")}
    tensors.fill(StoredBox(name, 0, 0, values) for name, values in found.items())
    return found


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
