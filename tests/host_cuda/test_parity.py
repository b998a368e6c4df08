"""Layouts on the host's CUDA device give the numbers of one rank on the CPU: gradients, parameters, losses, experience."""

from __future__ import annotations

import pytest
import torch

from megappo.commands.verify.compare import compare
from tests.host_cuda.parity_cases import CASES, on_the_cpu
from tests.host_cuda.world import Scenario, run_world
from tests.parity.matrix import write_models
from tests.parity.test_layouts import BF16_BOUND, rms
from tests.worlds import spawn_world

FP32 = [pytest.param(model, name, id=f"{model}-{name}") for model in CASES for name in CASES[model] if "bf16" not in name]
NOT_SUMMED = "dp2, gradients are not summed"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    made = {model: tmp_path_factory.mktemp("host_cuda_parity") / model for model in CASES}
    for model, folder in made.items():
        write_models(folder, model)
    return {model: str(folder) for model, folder in made.items()}


@pytest.fixture(scope="module")
def on_the_device(cuda_python, folders) -> dict:
    scenarios = [
        Scenario(f"{model} {name}", "tests.host_cuda.parity_cases:on_the_device", (folders[model], model, name))
        for model in CASES
        for name in CASES[model]
    ]
    scenarios.append(Scenario(f"llama {NOT_SUMMED}", "tests.host_cuda.parity_cases:without_sums", (folders["llama"],)))
    return run_world(cuda_python, scenarios, 2)


@pytest.fixture(scope="module")
def alone(cuda_python, folders) -> dict:
    return spawn_world(on_the_cpu, 1, folders)[0]


def found(on_the_device: dict, model: str, name: str):
    for finding in on_the_device[f"{model} {name}"]:
        assert finding.error is None, finding.error
    return on_the_device[f"{model} {name}"][0].result


@pytest.mark.parametrize("model, name", FP32)
def test_a_layout_on_the_device_gives_the_numbers_of_one_cpu_rank(on_the_device, alone, model: str, name: str) -> None:
    differences = compare(found(on_the_device, model, name), alone[model][""])
    assert [(d.role, d.quantity, d.where, d.relative) for d in differences if not d.agrees] == []
    assert {"gradients", "parameters", "logprobs", "values", "advantages"} <= {d.quantity for d in differences}


def test_gradients_that_megappo_does_not_sum_are_noticed(on_the_device, alone) -> None:
    differences = compare(found(on_the_device, "llama", NOT_SUMMED), alone["llama"][""])
    disagreeing = {(d.role, d.quantity) for d in differences if not d.agrees}
    assert {(role, quantity) for role in ("policy", "critic") for quantity in ("gradients", "parameters")} <= disagreeing
    assert ("policy", "logprobs") not in disagreeing, "of before the first update"


def test_bf16_errs_no_more_than_rounding_does(on_the_device, alone) -> None:
    """With varlen attention and products in bf16 summed in fp32, as a GPU does it."""
    here, exact, rounded = found(on_the_device, "llama", "tp2 sp / pp2, bf16"), alone["llama"][""], alone["llama"]["bf16"]
    for role, quantity in (("policy", "logprobs"), ("critic", "values")):
        mine, other = (rms(m[role].values[quantity][0], exact[role].values[quantity][0]) for m in (here, rounded))
        assert 0 < mine < 2 * other < 2 * BF16_BOUND, (role, mine, other)
    assert not torch.equal(here["policy"].values["logprobs"][0], rounded["policy"].values["logprobs"][0])
