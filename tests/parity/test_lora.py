"""Policy and critic with adapters give the numbers of the step written out in every layout, and of each other in both engines."""

from __future__ import annotations

from typing import Any

import pytest

from megappo.commands.verify.compare import compare
from megappo.models.hf_config import read_arch
from tests.parity.conftest import numbers_of, order_of, samples
from tests.parity.lora import ALL, CASES, FAULTS, OF_FSDP2, SCALE, adapters_at_start, changes_of, run_lora
from tests.parity.matrix import config_of, title, write_models
from tests.parity.oracle import Adapters, Outcome, ppo_step
from tests.parity.test_layouts import disagreements
from tests.parity.test_oracle import PARAMETER_TOLERANCE, TOLERANCE, differences
from tests.worlds import spawn_world

BASELINE = "tp1 pp1 dp1"
TWO_RANKS = [title(case, 2) for case in CASES[2]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("lora") / "llama"
    write_models(path, "llama")
    write_models(path.with_name("qwen3_moe"), "qwen3_moe", kv_heads=1)  # two ranks have copies, of adapters too
    write_models(path.with_name("deepseek_v3"), "deepseek_v3")
    return path


@pytest.fixture(scope="module")
def measured(folder) -> dict[int, dict[str, Any]]:
    """world size -> title -> Measured"""
    folders = str(folder), str(folder.with_name("qwen3_moe")), str(folder.with_name("deepseek_v3"))
    return {size: spawn_world(run_lora, size, *folders)[0] for size in CASES}


@pytest.fixture(scope="module")
def expected(folder) -> Outcome:
    config = config_of(folder, **changes_of(ALL))
    tensors = adapters_at_start(read_arch(config.policy.model), config.policy.lora, config.run.seed)
    adapters, seed = Adapters(tensors, SCALE), config.run.seed
    return ppo_step(folder / "policy", folder / "reference", samples(), order_of(config), numbers_of(config), seed, adapters)


def faulty(found: Any, expected: Outcome) -> dict[str, float]:
    """Quantities that differ from those of the step written out by more than they may."""
    sizes = dict(differences(found, expected))
    allowed = {name: PARAMETER_TOLERANCE if name.endswith("parameters") else TOLERANCE for name in sizes}
    return {name: size for name, size in sizes.items() if not size <= allowed[name]}


def test_one_rank_gives_the_numbers_of_the_step_written_out(measured, expected) -> None:
    assert faulty(measured[1][BASELINE], expected) == {}


@pytest.mark.parametrize("name", [*TWO_RANKS, *OF_FSDP2])
def test_every_layout_gives_the_numbers_of_one_rank(measured, name: str) -> None:
    assert disagreements(measured[2][name], measured[1][BASELINE]) == []


def test_adapters_on_some_modules_of_a_fused_linear_give_the_numbers_of_one_rank(measured) -> None:
    assert disagreements(measured[2]["some"], measured[1]["some"]) == []
    trained = {name.split(".")[-3] for name in measured[1]["some"]["policy"].gradients.tensors}
    assert trained == {"k_proj", "up_proj", "down_proj"}


def test_experts_and_what_is_beside_them_give_the_numbers_of_one_rank(measured) -> None:
    """The balancing loss too has a gradient in the adapters, through routers that are frozen."""
    for name in ("experts", "latent"):
        assert disagreements(measured[2][name], measured[1][name]) == []
    assert any(".experts.7.up_proj." in name for name in measured[1]["experts"]["critic"].gradients.tensors)
    assert len({name.split(".")[-3] for name in measured[2]["latent"]["policy"].gradients.tensors}) == 4


def test_only_adapters_and_the_value_head_train(measured, folder) -> None:
    """Every adapter of both roles has a gradient; the base has none, and does not move."""
    first = measured[1][BASELINE]
    kinds = {name.rpartition("lora_")[1] for name in first["policy"].gradients.tensors}
    assert kinds == {"lora_"} and first["critic"].gradients.tensors.keys() - first["policy"].gradients.tensors.keys() == {
        "score.weight"
    }
    for role in ("policy", "critic"):
        assert all(float(tensor.abs().max()) > 0 for tensor in first[role].gradients.tensors.values())
    one_step, several = (measured[1][name]["policy"].parameters.tensors for name in (BASELINE, "replayed"))
    moved = {name for name in one_step if not one_step[name].equal(several[name])}
    assert moved == set(first["policy"].gradients.tensors)


def test_several_steps_end_with_the_same_adapters(measured) -> None:
    found = compare(measured[2]["replayed"], measured[1]["replayed"], 1.0, PARAMETER_TOLERANCE)
    parameters = [d for d in found if d.quantity == "parameters"]
    assert {d.role for d in parameters} == {"policy", "critic"}
    assert [f"{d.role} {d.where}: {d.relative:.1e}" for d in parameters if not d.agrees] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_in_one_layout_is_noticed(measured, fault: str) -> None:
    by_quantity = {(d.role, d.quantity): d for d in compare(measured[2][fault], measured[1][BASELINE])}
    worst = by_quantity["policy", "gradients"]
    assert worst.relative > 100 * worst.tolerance
