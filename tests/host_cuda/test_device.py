"""The device itself: late copies, races, counted memory, refusals, NCCL's rules; each also without a fault."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.host_cuda import build
from tests.host_cuda.device_cases import SIZE, WAITS
from tests.host_cuda.world import Scenario, run_world

SCENARIOS = {
    "device_cases": (
        "missing_waits",
        "freed_too_early",
        "pageable_and_queries",
        "memory",
        "refusals",
        "random_numbers",
        "written_out_kernels",
        "two_devices",
        "nccl_rules",
    ),
    "library_cases": ("operation_in_python", "triton_kernel", "fused_optimizers"),
}


@pytest.fixture(scope="module")
def together(cuda_python) -> dict:
    """Scenario -> what two ranks found, on devices of half a GiB. The last one breaks its group."""
    scenarios = [Scenario(name, f"tests.host_cuda.{module}:{name}") for module, names in SCENARIOS.items() for name in names]
    scenarios.append(Scenario("late_rank", "tests.host_cuda.device_cases:late_rank"))
    settings = {"gib": "0.5", "fused_optimizers": "1"}
    return run_world(cuda_python, scenarios, 2, imports=(), environment={"TRITON_INTERPRET": "1"}, **settings)


@pytest.fixture(scope="module")
def alone(together) -> dict:
    """Of the first rank."""
    return {name: ranks[0] for name, ranks in together.items()}


def result_of(finding):
    assert finding.error is None, finding.error
    return finding.result


def test_a_library_that_looks_for_torch_before_its_import_changes_nothing(cuda_python) -> None:
    """As transformers does."""
    code = "import importlib.util as u; u.find_spec('torch'); import torch; print((torch.ones(2, device='cuda') + 1).tolist())"
    variables = {**os.environ, **build.environment(cuda_python), "PYTHONPATH": build.site()}
    found = subprocess.run([cuda_python, "-c", code], env=variables, capture_output=True, text=True, timeout=120)
    assert found.stdout == "[2.0, 2.0]\n", found.stderr


@pytest.mark.parametrize("wait", [wait for wait in WAITS if wait])
def test_a_missing_wait_is_refused_or_gives_wrong_numbers(alone, wait: str) -> None:
    found = result_of(alone["missing_waits"])
    right = (4.0 * SIZE, 4.0 * SIZE)
    assert found[""] == ("", right), "with all waits"
    raised, numbers = found[wait]
    if wait == "the host waits for the copy out":
        assert not raised and numbers[0] == 0.0, "what the host reads is not watched, but late"
    else:
        assert "race: " in raised and "nothing makes the one wait for the other" in raised
    if wait != "copy out waits for the kernel":  # the copy is late enough by itself
        assert numbers != right


def test_memory_of_another_stream_needs_record_stream(alone) -> None:
    found = result_of(alone["freed_too_early"])
    assert found["recorded"] == ("", SIZE)
    raised, numbers = found["not recorded"]
    assert "RaceError: race: full" in raised and numbers != SIZE


def test_pageable_copies_do_not_wait_and_queries_end(alone) -> None:
    found = result_of(alone["pageable_and_queries"])
    assert found["pageable"] == SIZE and found["after the query"] == 5.0 * SIZE and found["asked"] > 1
    assert found["waits"] == ["a number", "a list", "a copy to the host", "a mask"]


def test_memory_is_counted_and_limited(alone) -> None:
    found = result_of(alone["memory"])
    assert found["total"] == 1 << 29 and found["grown"] == found["less free"] == found["largest block"] == 64 << 20
    assert found["peak"] >= 64 << 20 and found["given back"] == 0
    assert found["fragmented"] > 0 and found["poison"] == 0x7F
    assert found["out of memory"].startswith("OutOfMemoryError: CUDA out of memory") and found["goes on"] == 3.0


def test_what_a_gpu_refuses_is_refused(alone) -> None:
    found = result_of(alone["refusals"])
    assert all("same device" in found[name] for name in ("mixed", "mixed by index", "out on the host"))
    assert "launched past torch's dispatcher" in found["kernel"] and "Tensors must be contiguous" in found["nccl, not contiguous"]
    assert found["number and index"] == "8.0 12.0"


def test_random_numbers_follow_the_generators_state(alone) -> None:
    assert all(result_of(alone["random_numbers"]).values())


def test_written_out_kernels_compute_what_they_are_named_after(alone) -> None:
    for name, error in result_of(alone["written_out_kernels"]).items():
        assert error < (2e-2 if "bf16" in name and "varlen" in name else 1e-5), (name, error)


def test_two_devices_do_not_mix(together) -> None:
    found = result_of(together["two_devices"][0])
    assert (found["sum"], found["device"]) == (6.0, "cuda:1") and "same device" in found["mixed"]


def test_nccl_keeps_its_rules_over_gloo(together) -> None:
    for finding in together["nccl_rules"]:
        found = result_of(finding)
        assert found["backend"] == "nccl [device(type='cuda')]"
        assert "No backend type associated with device type cpu" in found["cpu"]
        assert found["mean"] == str([1.5] * 4) and found["in time"] == str([3.0] * 4)
        assert found["early"].startswith("RaceError") and found["early numbers"] != found["in time"]
        assert "the ranks are not at the same collective" in found["order"] and "broadcast_" in found["order"]
        assert "[3]" in found["shapes"] and "[4]" in found["shapes"]
    exchanged = [finding.result["exchanged"] for finding in together["nccl_rules"]]
    assert exchanged == [str([2.0] * 4), str([1.0] * 4)]


def test_a_late_rank_runs_into_the_limit_of_its_group(together) -> None:
    assert "imed out" in result_of(together["late_rank"][0]) or "past the group's limit" in result_of(together["late_rank"][0])


def test_an_operation_that_is_written_in_python_computes(alone) -> None:
    assert result_of(alone["operation_in_python"]) == [2.0] * 3


def test_an_interpreted_kernel_is_work_of_its_stream(alone) -> None:
    found = result_of(alone["triton_kernel"])
    assert found["reads what is read"] == found["is read beside it"] == ""
    assert "race: add_one on stream" in found["reads what is written"] and " reads " in found["reads what is written"]
    assert "race: add_one on stream" in found["writes what is read"] and " writes " in found["writes what is read"]
    assert found["numbers"] == [6.0] * 1024


def test_fused_optimizers_compute_what_they_are_named_after(alone) -> None:
    found = result_of(alone["fused_optimizers"])
    for name, error in found["errors"].items():
        assert error < 1e-6, (name, error)
    assert found["without bias correction"] > 1e-3, "negative control"
    assert found["overflow"] == [0, 1, 1, 0]


def test_fused_optimizers_are_one_kernel_and_the_rest_of_transformer_engine_is_absent(alone) -> None:
    found = result_of(alone["fused_optimizers"])
    assert found["grown"] == 0 < found["grown, torch's"]
    assert "race: multi_tensor_l2norm on stream" in found["race"]
    assert "not contiguous" in found["not contiguous"] and "on one CUDA device" in found["on the host"]
    assert "other sizes" in found["other sizes"] and "FusedSGD" in found["sgd"]
    assert found["absent"] == ["transformer_engine", "transformer_engine.pytorch"]
