"""PPO on the host's CUDA device: the numbers of the same run on the CPU; resume, export, offload, every choice of kernels."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from megappo.ops.implementations import LIBRARY
from tests.host_cuda.ppo_runs import config_of, metrics_of, offloading, train_once
from tests.host_cuda.world import Scenario, run_world
from tests.ops.conftest import compiled_for_cpu
from tests.trainer.small_run import write_small_task
from tests.worlds import spawn_world

STEPS, HALF = 4, 2
# Other kernels on the other side, and Adam makes parts of a step of the rounding of small gradients.
TOLERANCE = 5e-3
LAST_MICRO_BATCH = 4096  # bytes; the smallest activation of a layer is larger
KERNELS = ("auto", "cuda", "triton")
CHANGES: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (STEPS, {}),
    "halves": (HALF, {}),
    "offload": (STEPS, offloading()),
    **{kernels: (HALF, {"kernels": kernels}) for kernels in KERNELS},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("host_cuda_ppo")
    write_small_task(folder)
    return folder


@pytest.fixture(scope="module")
def on_cpu(cuda_python, folder: Path) -> list[dict[str, Any]]:
    config = config_of(folder, "cpu", STEPS, "cpu")
    spawn_world(train_once, 2, config, False, timeout_s=400)
    return metrics_of(config)


@pytest.fixture(scope="module")
def on_device(cuda_python, folder: Path) -> dict[str, list]:
    """Name of a run -> what both ranks found."""
    library = folder / "library.so"
    shutil.copy(compiled_for_cpu(), library)
    built_with_cuda = {"cuda": True, "cuda_archs": "8.0;9.0a", "cuda_toolkit": "13.0"}
    facts = {**json.loads(LIBRARY.with_suffix(".json").read_text()), **built_with_cuda}
    library.with_suffix(".json").write_text(json.dumps(facts))
    environment = {
        "HOST_CUDA_PLUGIN": str(Path(__file__).parent / "native_plugin.py"),
        "MEGAPPO_ON_CPU_LIBRARY": str(library),
        "MEGAPPO_CACHE": str(folder / "cache"),
    }
    runs = "tests.host_cuda.ppo_runs"
    scenarios = [
        Scenario(name, f"{runs}:train_once", (config_of(folder, name, steps, "cuda", **changes), False))
        for name, (steps, changes) in CHANGES.items()
    ]
    resumed = Scenario("resumed", f"{runs}:train_once", (config_of(folder, "halves", STEPS, "cuda"), True))
    return run_world(cuda_python, [*scenarios, resumed], 2, timeout_s=550, environment=environment)


def metrics(folder: Path, found: dict[str, list], name: str) -> list[dict[str, Any]]:
    for finding in found[name]:
        assert finding.error is None, finding.error
    steps, changes = CHANGES[name]
    return metrics_of(config_of(folder, name, steps, "cuda", **changes))


def assert_close(mine: list[dict], other: list[dict], tolerance: float) -> None:
    for a, b in zip(mine, other):
        assert a.keys() == b.keys()
        for name, number in b.items():
            if isinstance(number, float):
                assert math.isclose(a[name], number, rel_tol=tolerance, abs_tol=1e-4), (a["step"], name, a[name], number)


def test_every_step_has_the_numbers_of_the_cpu(folder, on_cpu, on_device) -> None:
    whole = metrics(folder, on_device, "whole")
    assert len(whole) == len(on_cpu) == STEPS
    assert_close(whole, on_cpu, TOLERANCE)
    assert whole[0]["policy/grad_norm"] > 0.1 and whole[0] != whole[1]


def test_a_resumed_run_ends_with_the_same_bits(folder, on_device) -> None:
    whole = metrics(folder, on_device, "whole")
    assert on_device["resumed"][0].error is None, on_device["resumed"][0].error
    assert metrics(folder, on_device, "halves") == whole
    files = [folder / "runs" / name / "export/model.safetensors" for name in ("whole", "halves")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes() != (folder / "model/model.safetensors").read_bytes()


def test_offload_changes_no_number_and_leaves_the_device_empty(folder, on_device) -> None:
    assert metrics(folder, on_device, "offload") == metrics(folder, on_device, "whole")
    for kept, parked in zip(on_device["whole"], on_device["offload"]):
        assert parked.result[-1] < kept.result[-1] / 4


@pytest.mark.parametrize("name", ["whole", "offload"])
def test_no_step_leaves_memory_behind(folder, on_device, name: str) -> None:
    """Up to a few fields of the last micro-batch, which the engine still holds and which are of its size."""
    metrics(folder, on_device, name)
    for finding in on_device[name]:
        held = finding.result
        assert max(held[2:]) < held[1] + LAST_MICRO_BATCH and min(held) > LAST_MICRO_BATCH, held


@pytest.mark.parametrize("kernels", KERNELS)
def test_every_choice_of_kernels_runs_to_the_end(folder, on_device, kernels: str) -> None:
    assert_close(metrics(folder, on_device, kernels), metrics(folder, on_device, "whole")[:HALF], TOLERANCE)
