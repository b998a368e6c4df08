"""vLLM's GPU worker in the trainer's ranks on the host's CUDA device: its model is the trainer's, the streams are in order."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests.host_cuda.vllm_cases import RANKS, WAITS
from tests.host_cuda.world import TRAINER, Scenario, run_world
from tests.models.checkpoints import write_checkpoint

CASES = {"v1, tp 2": (2, "v1"), "v2, tp 1 x 2": (1, "v2")}
LAST = "v2, tp 1 x 2"
RUNNERS = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.model_runner"}
TOLERANCE = 1e-4  # fp32; as tests/rollout/test_policy_push.py


@pytest.fixture(scope="module")
def world(cuda_python, tmp_path_factory) -> dict:
    if subprocess.run([cuda_python, "-c", "import importlib.metadata as m; m.version('vllm')"], capture_output=True).returncode:
        pytest.skip(f"{cuda_python} has no vllm")
    model = tmp_path_factory.mktemp("host_cuda_vllm") / "llama"
    write_checkpoint(model, "llama", head_dim=32, num_hidden_layers=2)
    where = "tests.host_cuda.vllm_cases:"
    scenarios = [Scenario("prepare", where + "prepare")]
    scenarios += [Scenario(name, where + "pushed_and_asked", (str(model), *case, name == LAST)) for name, case in CASES.items()]
    imports = [*TRAINER, "tests.host_cuda.vllm_imported"]
    return run_world(cuda_python, scenarios, RANKS, imports=imports, environment={"TRITON_INTERPRET": "1"})


def found(world: dict, name: str) -> list[Any]:
    for finding in world[name]:
        assert finding.error is None, finding.error
    return [finding.result for finding in world[name]]


@pytest.mark.parametrize("name", CASES)
def test_vllms_gpu_model_is_the_trainers_before_and_after_an_update(world, name: str) -> None:
    for result in found(world, name):
        assert result["runner"] == RUNNERS[CASES[name][1]]
        for verified, wrong, distance, stale in result["versions"]:
            assert (verified, wrong) == (1.0, []) and distance < TOLERANCE
        assert stale > 0.1, "the comparison would notice weights of before the update"


@pytest.mark.parametrize("name", CASES)
def test_the_trainers_stream_and_torch_are_as_they_were(world, name: str) -> None:
    for result in found(world, name):
        assert result["kept"] == [True, True]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("waits", ("", *WAITS))
def test_a_wait_between_the_streams_that_is_removed_is_noticed(world, name: str, waits: str) -> None:
    for result in found(world, name):
        assert "race: mul_" in result["races"][waits] if waits else result["races"][waits] == ""


@pytest.mark.parametrize("name", CASES)
def test_a_push_cuts_running_requests_without_a_race_with_steps_that_are_scheduled_ahead(world, name: str) -> None:
    for result in found(world, name):
        assert result["half drawn"] and all(sum(of) == 3 and len(of) == 2 for of in result["half drawn"])


def test_vllm_does_not_answer_from_weights_that_are_still_being_pushed(world) -> None:
    for result in found(world, LAST):
        assert "race: " in result["answer"]
