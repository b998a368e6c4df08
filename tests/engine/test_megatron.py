"""Behaviour of the Megatron engine beside the numbers: optimizer sharding, offload, skipped steps, the schedule, budgets.

That the numbers do not depend on the layout is measured on the whole PPO step in tests/parity.
"""

from __future__ import annotations

import math

import pytest

from megappo.parallel.layout import ParallelLayout
from tests.engine.runs import STEPS, recorded_batch, worlds_of
from tests.models.checkpoints import write_checkpoint
from tests.worlds import spawn_world

SP = dict(tp=2, sequence_parallel=True)
TWO = [dict(), SP, dict(pp=2, vpp=2)]
# fp32: a few hundred additions in another order; the values compared are of order 1.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, dict]:
    path = str(tmp_path_factory.mktemp("engine") / "llama")
    write_checkpoint(path, "llama", num_hidden_layers=4)
    (alone,) = spawn_world(worlds_of, 1, path, [dict()])
    two = spawn_world(worlds_of, 2, path, TWO)
    for rank, results in enumerate(two):
        same = results == two[0] or _only_facts_of_the_rank_differ(results, two[0])
        assert same, f"rank {rank} reports other numbers than rank 0"
    return {**two[0], **alone}


def _only_facts_of_the_rank_differ(mine: dict, first: dict) -> bool:
    """Stages may hold different numbers of bytes."""
    return all(mine[k] == first[k] or k.endswith("freed") for k in first)


def difference(a: object, b: object) -> float:
    """Largest |a - b| / max(1, |b|) over nested lists and dicts of numbers."""
    if isinstance(a, dict):
        return max(difference(a[k], b[k]) for k in b)
    if isinstance(a, list):
        assert len(a) == len(b)
        return max((difference(x, y) for x, y in zip(a, b)), default=0.0)
    return abs(a - b) / max(1.0, abs(b))


BASE = "tp1 pp1 dp1"
LAYOUTS = [str(ParallelLayout(2, **sizes)) for sizes in TWO]


@pytest.mark.parametrize("layout", [BASE, *LAYOUTS])
@pytest.mark.parametrize("variant", ["", "offloaded", "plain optimizer"])
def test_offload_and_optimizer_sharding_change_nothing(runs, layout: str, variant: str) -> None:
    assert difference(runs[f"{layout} {variant}".strip()]["rows"], runs[BASE]["rows"]) < TOLERANCE


@pytest.mark.parametrize("layout", [BASE, *LAYOUTS])
def test_offload_gives_the_same_bits(runs, layout: str) -> None:
    assert runs[f"{layout} offloaded"]["rows"] == runs[layout]["rows"]


def test_budget_decides_the_number_of_micro_batches(runs) -> None:
    assert runs[f"{BASE} one sequence"]["micro_batches"] == 9
    assert runs[f"{BASE} whole"]["micro_batches"] == 1
    assert 1 < runs[BASE]["micro_batches"] < 9


@pytest.mark.parametrize("layout", [BASE, LAYOUTS[-1]])
def test_a_non_finite_gradient_is_skipped_everywhere_and_the_third_stops(runs, layout: str) -> None:
    result = runs[f"{layout} non-finite"]
    assert result["applied"] == [False, False] and result["unchanged"]
    assert result["error"].startswith("policy: gradient norm not finite in 3 steps in a row; rank 0 (stage 0, tp 0): ")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", ["sharded", "plain"])
def test_a_non_finite_gradient_on_one_rank_stops_them_all_and_is_named_first(runs, layout: str, optimizer: str) -> None:
    """Also where the other rank holds a copy of that gradient, and would take the step."""
    result = runs[f"{layout} non-finite on rank 1, {optimizer}"]
    assert result["applied"] == [False, False, True, False, False] and result["unchanged"]
    at = ParallelLayout(2, **TWO[LAYOUTS.index(layout)]).coordinates(1)
    start = f"policy: gradient norm not finite in 3 steps in a row; rank 1 (stage {at.pp}, tp {at.tp}): {result['poisoned']}; "
    assert result["error"] == f"{start}rank 0: none of their own tensors"


@pytest.mark.parametrize("layout", [BASE, *LAYOUTS])
def test_offload_frees_the_parameters(runs, layout: str) -> None:
    assert runs[f"{layout} freed"]["working"] > 0 and runs[f"{layout} freed"]["offloaded"] == 0


def test_schedule_warms_up_from_the_first_step_and_ends_at_its_minimum(runs) -> None:
    rates = runs[f"{BASE} schedule"]
    assert rates[:2] == pytest.approx([0.5, 1.0])
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates[1:], rates[2:]))


def test_ratio_of_the_first_update_is_one(runs) -> None:
    assert runs[BASE]["rows"][0]["ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert runs[BASE]["rows"][STEPS - 1]["ratio_max"] > 1.001


def test_a_denominator_per_micro_batch_would_be_noticed(runs) -> None:
    """Negative control: averaging the means of micro-batches is what peers shipped; on this batch it is off by far more than
    allowed.
    """
    weight, advantage = recorded_batch()["weight"], recorded_batch()["advantage"]
    cu = recorded_batch().cu_seqlens.tolist()
    per_sequence = [(weight[a:b].sum(), (weight * advantage)[a:b].sum()) for a, b in zip(cu, cu[1:]) if weight[a:b].sum() > 0]
    mean_of_means = sum(float(s / w) for w, s in per_sequence) / len(per_sequence)
    right = float((weight * advantage).sum() / weight.sum())
    assert abs(mean_of_means - right) > 100 * TOLERANCE
    assert runs[BASE]["rows"][0]["policy_loss"] == pytest.approx(-right, abs=TOLERANCE)
    assert not math.isclose(runs[BASE]["rows"][0]["policy_loss"], -mean_of_means, abs_tol=TOLERANCE)
