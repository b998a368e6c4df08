"""Negative controls: every mistake of `faults.py` turns the comparison red, and by far more than the tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from megappo.commands.verify.compare import compare
from tests.parity.matrix import FSDP2, SP, Case, measure_case, roles_of
from tests.parity.test_layouts import BASELINE
from tests.parity.test_oracle import TOLERANCE, differences
from tests.worlds import spawn_world

# Mistakes that all layouts share show against the step written out; fault -> quantity that gives it away.
SHARED = {
    "no right shift": "values",
    "temperature on values": "values",
    "labels rolled over the pack": "logprobs",
}
# Others show between layouts: fault -> (model, layout of two ranks, (role, quantity)).
BETWEEN: dict[str, tuple[str, Case, tuple[str, str]]] = {
    "labels rolled on each cp rank": ("llama", {"cp": 2}, ("policy", "logprobs")),
    "normalised per micro-batch": ("llama", {}, ("critic", "gradients")),
    "whitened on each rank": ("llama", {}, ("experience", "advantages")),
    "forgotten all-reduce of norms": ("llama", SP, ("policy", "gradients")),
    "forgotten all-reduce of the router": ("qwen3_moe", {**SP, "ep": 2}, ("policy", "gradients")),
    "forgotten all-reduce of the value head": ("llama", SP, ("critic", "gradients, copies")),
    "copies of a KV head not added up": ("mistral_window", {"tp": 2}, ("policy", "gradients")),
    "every copy of a KV head counted": ("mistral_window", {"tp": 2}, ("critic", "gradient norm")),
    "fsdp2: forgotten sum of norms over tp": ("llama", SP, ("critic", "gradients")),
    "fsdp2: copies counted by every tp rank": ("llama", SP, ("policy", "gradient norm")),
    "fsdp2: mean of gradients over ranks": ("llama", {"cp": 2}, ("policy", "gradients")),
    "fsdp2: odd rows off by one": ("llama", {"tp": 2}, ("policy", "logprobs")),
}


def measure_with_fault(rank: int, folder: str, case: Case, name: str):
    from megappo.parallel import cpu_patches
    from tests.parity.faults import FAULTS

    cpu_patches.install()
    with roles_of(case) as roles, FAULTS[name]():
        return measure_case(folder, roles, FSDP2["fsdp2"] if name.startswith("fsdp2") else {})


def measure_all(rank: int, jobs: list[tuple[str, Case, str]]):
    found = {name: measure_with_fault(rank, folder, case, name) for folder, case, name in jobs}
    return found if rank == 0 else {}


def jobs_alone(models: Mapping[str, Path]) -> list[tuple[str, Case, str]]:
    return [(str(models["llama"]), {}, name) for name in SHARED]


def jobs_between(models: Mapping[str, Path]) -> list[tuple[str, Case, str]]:
    return [(str(models[model]), case, name) for name, (model, case, _) in BETWEEN.items()]


@pytest.fixture(scope="module")
def faulty(models):
    """fault -> Measured with it."""
    return {**spawn_world(measure_all, 1, jobs_alone(models))[0], **spawn_world(measure_all, 2, jobs_between(models))[0]}


@pytest.mark.parametrize("fault", SHARED)
def test_a_mistake_in_every_layout_is_noticed_by_the_step_written_out(faulty, expected, fault: str) -> None:
    found = dict(differences(faulty[fault], expected["llama"]))
    assert found[SHARED[fault]] > 100 * TOLERANCE


@pytest.mark.parametrize("fault", BETWEEN)
def test_a_mistake_in_one_layout_is_noticed_between_layouts(faulty, measured, fault: str) -> None:
    model, _, quantity = BETWEEN[fault]
    by_quantity = {(d.role, d.quantity): d for d in compare(faulty[fault], measured[1][model][BASELINE])}
    assert by_quantity[quantity].relative > 100 * by_quantity[quantity].tolerance


def test_no_right_shift_is_invisible_between_layouts(faulty, measured) -> None:
    """Reason for the step written out: its gradients are finite, its loss falls, and every layout would agree with it."""
    found = {(d.role, d.quantity): d for d in compare(faulty["no right shift"], measured[1]["llama"][BASELINE])}
    assert found["policy", "logprobs"].agrees and not found["critic", "values"].agrees
