"""The plan's peak against what torch's allocator held: tests/commands/plan/test_gpu_memory.py at a small size, on the host's
device."""

from __future__ import annotations

import pytest

from tests.commands.plan.live import planned_on_one_gpu
from tests.host_cuda.memory_cases import ARCH, BUDGET
from tests.host_cuda.world import Scenario, run_world

# Of engine/offload.py; the first leaves none out.
WAITS = ("", "the wait before the memory is freed", "the wait for the last copy from the host's buffer")
# Of checkpoint/image.py.
SNAPSHOT_WAITS = ("", "the wait for what is queued", "the wait for the copy")
CASES = [("none", False), ("full", False), ("none", True)]  # recompute, value head


@pytest.fixture(scope="module")
def measured(cuda_python) -> dict:
    scenarios = [
        Scenario(f"{recompute} {critic}", "tests.host_cuda.memory_cases:peaks", (recompute, critic)) for recompute, critic in CASES
    ]
    offload = "tests.host_cuda.memory_cases:offload_across_streams"
    scenarios += [Scenario(f"offload without {without}", offload, (without,)) for without in WAITS]
    snapshot = "tests.host_cuda.memory_cases:snapshot_in_a_thread"
    scenarios += [Scenario(f"snapshot without {without}", snapshot, (without,)) for without in SNAPSHOT_WAITS]
    return run_world(cuda_python, scenarios)


@pytest.mark.parametrize("recompute, critic", CASES)
def test_the_peak_is_the_plans_within_a_tenth(measured, recompute: str, critic: bool) -> None:
    (finding,) = measured[f"{recompute} {critic}"]
    assert finding.error is None, finding.error
    forward, update = finding.result
    memory = planned_on_one_gpu(ARCH, BUDGET, recompute, critic, adam_buffers=True)
    assert 0.9 < forward / (memory.resident + memory.inferring) < 1.1
    assert 0.9 < update / (memory.resident + memory.active) < 1.1
    other = planned_on_one_gpu(ARCH, BUDGET, "none" if recompute == "full" else "full", critic, adam_buffers=True)
    assert not 0.9 < update / (other.resident + other.active) < 1.1, "negative control"


@pytest.mark.parametrize("without", WAITS)
def test_a_wait_that_is_removed_from_offload_is_noticed(measured, without: str) -> None:
    (finding,) = measured[f"offload without {without}"]
    assert finding.error is None, finding.error
    raised, whole = finding.result
    assert (raised, whole) == ("", True) if not without else "race: " in raised


@pytest.mark.parametrize("without", SNAPSHOT_WAITS)
def test_a_wait_that_is_removed_from_a_snapshot_is_noticed(measured, without: str) -> None:
    (finding,) = measured[f"snapshot without {without}"]
    assert finding.error is None, finding.error
    raised, whole = finding.result
    assert (raised, whole) == ("", True) if not without else "race: " in raised and not whole
