"""Twenty steps from recorded rollouts end with the same parameters in every layout, on the curves of the golden file."""

from __future__ import annotations

import json

import pytest

from megappo.commands.verify.compare import compare
from tests.parity.matrix import SP, Case, title
from tests.parity.replay import GOLDEN, REPLAYED, STEPS, curves, on_policy_world, replay_world
from tests.worlds import spawn_world

BASELINE = "tp1 pp1 dp1"
PARAMETER_TOLERANCE = 1e-4
# After 80 optimizer steps that each amplify the rounding of the one before.
CURVE_TOLERANCE = 1e-4
CUT = [
    pytest.param(model, size, title(case, size), id=f"{model}-{title(case, size)}")
    for model, sizes in REPLAYED.items()
    for size, cases in sizes.items()
    for case in cases
    if size > 1
]


@pytest.fixture(scope="module")
def replayed(models):
    """world size -> model -> title -> Measured."""
    folders = {model: str(models[model]) for model in REPLAYED}
    return {size: spawn_world(replay_world, size, folders)[0] for size in (1, 2)}


@pytest.mark.parametrize("model, size, name", CUT)
def test_parameters_after_all_steps_are_those_of_one_rank(replayed, model: str, size: int, name: str) -> None:
    found = compare(replayed[size][model][name], replayed[1][model][BASELINE], 1.0, PARAMETER_TOLERANCE)
    parameters = {d.role: d for d in found if d.quantity == "parameters"}
    assert parameters.keys() == {"policy", "critic"}
    assert [f"{d.role} {d.where}: {d.relative:.1e}" for d in parameters.values() if not d.agrees] == []


@pytest.mark.parametrize("model, size, name", [pytest.param(m, 1, BASELINE, id=f"{m}-{BASELINE}") for m in REPLAYED] + CUT)
def test_curves_are_those_of_the_golden_file(replayed, model: str, size: int, name: str) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))[model]
    found = curves(replayed[size][model][name])
    assert found.keys() == golden.keys()
    for quantity, values in golden.items():
        assert len(values) == STEPS
        assert found[quantity] == pytest.approx(values, rel=CURVE_TOLERANCE, abs=CURVE_TOLERANCE), quantity


@pytest.mark.parametrize("model", REPLAYED)
def test_the_replay_trains(replayed, model: str) -> None:
    """Flat curves would agree in any layout."""
    found = curves(replayed[1][model][BASELINE])
    assert found["critic/loss"][-1] < 0.8 * found["critic/loss"][0]
    assert max(found["policy/approx_kl"]) > 1e-4


ON_POLICY: dict[str, list[Case]] = {"llama": [SP, {"pp": 2, "vpp": 2}, {"cp": 2}], "qwen3_moe": [{"ep": 2}]}
RUNS = [pytest.param(model, title(case, 2), id=f"{model}-{title(case, 2)}") for model, cases in ON_POLICY.items() for case in cases]


@pytest.fixture(scope="module")
def first_steps(models):
    """model -> title -> FirstStep"""
    return spawn_world(on_policy_world, 2, {model: str(models[model]) for model in ON_POLICY}, ON_POLICY)[0]


@pytest.mark.parametrize("model, name", RUNS)
def test_the_kl_to_the_reference_is_zero_before_the_first_update_and_not_after(first_steps, model: str, name: str) -> None:
    (first, first_k3), (second, second_k3) = first_steps[model][name].kl
    assert first <= 1e-8 and first_k3 <= 1e-8
    assert second > 1e-4 and second_k3 > 1e-8


@pytest.mark.parametrize("model, name", RUNS)
def test_the_first_mini_batch_of_a_step_has_a_ratio_of_one(first_steps, model: str, name: str) -> None:
    ratio = first_steps[model][name].ratio
    assert abs(ratio[0] - 1.0) <= 1e-6
    assert ratio[-1] > 1.001, "the last mini-batch is off-policy"
