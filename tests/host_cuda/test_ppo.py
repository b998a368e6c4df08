"""PPO on the host's CUDA device: the numbers of the same run on the CPU; resume, export, offload, every choice of kernels.

Gradients are clipped and parameters updated by TransformerEngine's kernels, written out (`fused_optimizers`), as where it is
installed; on the CPU by torch's. Faults that are put into megappo show that the tests would notice them.
"""

from __future__ import annotations

import json
import math
import runpy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megappo.ops.implementations import LIBRARY
from tests.host_cuda.ppo_runs import config_of, metrics_of, offloading, quickstart_config, train_all
from tests.host_cuda.world import REPOSITORY, Scenario, run_world
from tests.ops.conftest import compiled_for_cpu
from tests.trainer.small_run import write_small_task
from tests.worlds import spawn_world

STEPS, HALF = 3, 2
# Other kernels on the other side, and Adam makes parts of a step of the rounding of small gradients.
TOLERANCE = 5e-3
LAST_MICRO_BATCH = 4096  # bytes; the smallest activation of a layer is larger
KERNELS = ("auto", "cuda", "triton")
FEW = {"data.prompts_per_step": 4, "algorithm.mini_batch_size": 8}  # Triton's kernels are interpreted: seconds a sample
SAVED = {"checkpoint.save_every": 1}  # the second save is copied while the third step generates
# name -> (steps, changes of the configuration, fault in megappo)
RUNS: dict[str, tuple[int, dict[str, Any], str]] = {
    "whole": (STEPS, SAVED, ""),
    "halves": (HALF, {}, ""),
    "offload": (STEPS, {**offloading(), **SAVED}, ""),
    "few": (1, FEW, ""),
    **{kernels: (1, {"kernels": kernels, **FEW}, "") for kernels in KERNELS},
    "cuda": (HALF, {"kernels": "cuda"}, ""),
    "leak": (STEPS, {}, "outputs of passes are kept"),
    "not-summed": (1, {}, "no all-reduce of the gradient of hidden states"),
    "stale": (HALF, offloading(), "offload takes its host copy for current"),
    "biased": (1, {}, "Adam without bias correction"),
    "late": (1, {}, "nothing waits for the copies of experience"),
}
COPIES = ("copies", "copied_bytes")
# The runtime's copies of the last step, of micro-batches and figures: experience is on the device, and stage 5 has one.
MOST_COPIES = {4: 46, 5: 1, 6: 64}
WAITS = {
    4: {"algo/aggregation.py true_positions": 1, "trainer/sampler_check.py compare_with_sampler": 1},  # before it is learned from
    5: {},
    # Of each of two updates of both roles: its figures, and the norm of its gradients. ratio_counts: of the histograms.
    6: {
        "engine/micro_batches.py combined_metrics": 4,
        "engine/megatron_optimizer.py step": 4,
        "algo/summaries.py ratio_counts": 2,
    },
}
WRONG_NUMBERS = ("not-summed", "stale", "biased")


@pytest.fixture(scope="module")
def folder(cuda_python, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("host_cuda_ppo")
    write_small_task(folder)
    return folder


@pytest.fixture(scope="module")
def quickstart(cuda_python, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("host_cuda_quickstart")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["quickstart_model.py", str(folder)])
        runpy.run_path(str(REPOSITORY / "scripts/quickstart_model.py"), run_name="__main__")
    return folder


@pytest.fixture(scope="module")
def on_cpu(cuda_python, folder: Path, quickstart: Path) -> dict[str, list[dict[str, Any]]]:
    """Metrics of the small run and of the quickstart."""
    configs = {"small": config_of(folder, "cpu", STEPS, "cpu"), "quickstart": quickstart_config(quickstart, "cpu", "cpu")}
    spawn_world(train_all, 2, list(configs.values()))
    return {name: metrics_of(config) for name, config in configs.items()}


@pytest.fixture(scope="module")
def on_device(cuda_python, folder: Path, quickstart: Path) -> dict[str, list]:
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
    # First: it is weighed, and what the run before it held may go in the midst of it.
    scenarios = [Scenario("quickstart", f"{runs}:train_by_phases", (quickstart_config(quickstart, "device", "cuda"),))]
    scenarios += [
        Scenario(name, f"{runs}:train_once", (config_of(folder, name, steps, "cuda", **changes), False, fault))
        for name, (steps, changes, fault) in RUNS.items()
        if name != "cuda"
    ]
    scenarios.append(Scenario("advantages", "tests.host_cuda.advantages_cases:both"))
    scenarios.append(Scenario("cuda", f"{runs}:train_and_count_waits", (config_of(folder, "cuda", HALF, "cuda", kernels="cuda"),)))
    scenarios.append(Scenario("resumed", f"{runs}:train_once", (config_of(folder, "halves", STEPS, "cuda"), True)))
    return run_world(cuda_python, scenarios, 2, environment=environment, fused_optimizers="1")


def found(on_device: dict[str, list], name: str) -> list:
    """Results of both ranks."""
    for finding in on_device[name]:
        assert finding.error is None, finding.error
    return [finding.result for finding in on_device[name]]


def metrics(folder: Path, on_device: dict[str, list], name: str) -> list[dict[str, Any]]:
    found(on_device, name)
    steps, changes, _ = RUNS[name]
    return metrics_of(config_of(folder, name, steps, "cuda", **changes))


def assert_close(mine: list[dict], other: list[dict], tolerance: float) -> None:
    for a, b in zip(mine, other):
        assert a.keys() == b.keys()
        for name, number in b.items():
            if isinstance(number, float):
                assert math.isclose(a[name], number, rel_tol=tolerance, abs_tol=1e-4), (a["step"], name, a[name], number)


def leaves_memory_behind(held: Sequence[int]) -> bool:
    """held: bytes after each step. Up to a few fields of the last micro-batch, which the engine still holds, do not count."""
    return max(held[2:]) >= held[1] + LAST_MICRO_BATCH


def test_every_step_has_the_numbers_of_the_cpu(folder, on_cpu, on_device) -> None:
    whole = metrics(folder, on_device, "whole")
    assert len(whole) == len(on_cpu["small"]) == STEPS
    assert_close(whole, on_cpu["small"], TOLERANCE)
    assert whole[0]["policy/grad_norm"] > 0.1 and whole[0] != whole[1]


@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_a_fault_in_megappo_changes_the_numbers(folder, on_cpu, on_device, name: str) -> None:
    wrong = metrics(folder, on_device, name)
    with pytest.raises(AssertionError, match="isclose"):
        assert_close(wrong, on_cpu["small"], TOLERANCE)


def test_a_resumed_run_ends_with_the_same_bits(folder, on_device) -> None:
    whole = metrics(folder, on_device, "whole")
    found(on_device, "resumed")
    assert metrics(folder, on_device, "halves") == whole
    files = [folder / "runs" / name / "export/model.safetensors" for name in ("whole", "halves")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes() != (folder / "model/model.safetensors").read_bytes()


def test_offload_changes_no_number_and_leaves_the_reference_alone_on_the_device(folder, on_device) -> None:
    """With what the last micro-batch left: together a quarter. One copy of the smallest part, the critic's stage, is a tenth."""
    assert metrics(folder, on_device, "offload") == metrics(folder, on_device, "whole")
    for kept, parked in zip(found(on_device, "whole"), found(on_device, "offload")):
        assert parked[-1] < 0.3 * kept[-1]


@pytest.mark.parametrize("name", ["whole", "offload"])
def test_no_step_leaves_memory_behind(on_device, name: str) -> None:
    for held in found(on_device, name):
        assert min(held) > LAST_MICRO_BATCH and not leaves_memory_behind(held), held


def test_outputs_that_megappo_keeps_are_noticed(on_device) -> None:
    """On the ranks whose stages have them: the policy's are on both."""
    for held in found(on_device, "leak"):
        assert leaves_memory_behind(held), held


def test_stages_4_to_6_are_on_the_device_and_the_host_waits_only_where_it_reads_a_number(on_device) -> None:
    for waits, ran, notes in found(on_device, "cuda"):
        assert {stage: {place: n for place, n in of.items() if place not in COPIES} for stage, of in waits.items()} == WAITS
        assert all(waits[stage]["copies"] <= most for stage, most in MOST_COPIES.items()), waits
        assert ran["token_advantages"] == "cuda"
    for differences in found(on_device, "advantages"):
        assert all(0.0 <= largest < 1e-5 and fields >= 8 for largest, fields in differences.values()), differences
    assert any(line.startswith("kernels on cuda: ") and "token_advantages" in line for line in notes)


def test_copies_of_experience_that_nothing_waits_for_are_refused(on_device) -> None:
    for finding in on_device["late"]:
        assert "race: " in str(finding.error)


@pytest.mark.parametrize("kernels", KERNELS)
def test_every_choice_of_kernels_runs_to_the_end(folder, on_device, kernels: str) -> None:
    without = "whole" if kernels == "cuda" else "few"
    assert_close(metrics(folder, on_device, kernels), metrics(folder, on_device, without), TOLERANCE)


def test_the_quickstart_has_the_numbers_of_the_cpu(quickstart, on_cpu, on_device) -> None:
    found(on_device, "quickstart")
    here = metrics_of(quickstart_config(quickstart, "device", "cuda"))
    assert len(here) == len(on_cpu["quickstart"]) == 2
    assert_close(here, on_cpu["quickstart"], TOLERANCE)
    assert here[1]["policy/grad_norm"] > 0, "the second step updates the policy"


def test_every_phase_of_the_quickstart_takes_the_memory_of_the_plan(on_device) -> None:
    first, second = found(on_device, "quickstart")
    assert len(first) == 10, "the plan's phases but for checkpoints, and what rests"
    for phases in (first, second):
        for phase, (peak, rest, work) in phases.items():
            assert 0.9 < peak / (rest + work) < 1.1, (phase, peak, rest, work)
    (peak, *_), (_, rest, work) = first["critic update"], second["critic update"]
    assert not 0.9 < peak / (rest + work) < 1.1, "negative control: the plan of the other stage"
