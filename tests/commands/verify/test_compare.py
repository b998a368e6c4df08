"""Differences that count, and the one of several that is named."""

from __future__ import annotations

import math

import pytest
import torch

from megappo.commands.verify.compare import compare, difference_table, first_cause, verdict, worst
from megappo.commands.verify.measure import Gathered, RoleMeasures

ONES = torch.ones(4)


def measured(*, logprobs=ONES, loss=ONES, values=ONES, gradient=ONES, spread=0.0) -> dict[str, RoleMeasures]:
    gradients = Gathered({"a.weight": ONES, "b.weight": gradient}, {"a.weight": 0.0, "b.weight": spread})
    policy = RoleMeasures({"logprobs": [ONES, logprobs], "loss": [ONES, loss]}, {"ratio_max": [ONES, ONES]}, gradients)
    return {"policy": policy, "critic": RoleMeasures({"values": [values]})}


def found(**changes) -> dict[str, float]:
    """Quantity -> relative difference, of what is not 0."""
    return {f"{d.role} {d.quantity} {d.where}": d.relative for d in compare(measured(**changes), measured()) if d.relative != 0}


def test_equal_measurements_agree() -> None:
    assert found() == {} and all(d.agrees for d in compare(measured(), measured()))


def test_a_number_is_relative_to_itself_or_to_one() -> None:
    changed = ONES.clone()
    changed[2] = 1.5
    assert found(logprobs=changed) == {"policy logprobs step 2 [2]": 0.5}
    small, large = measured(loss=torch.tensor([0.1, 0, 0, 0])), measured(loss=torch.tensor([0.2, 0, 0, 0]))
    assert worst(compare(small, large)).relative == pytest.approx(0.1)
    small, large = measured(loss=100 * ONES), measured(loss=200 * ONES)
    assert worst(compare(small, large)).relative == pytest.approx(0.5)


def test_a_tensor_is_relative_to_its_largest_element() -> None:
    baseline, other = measured(gradient=torch.tensor([0.0, 0, 0, 1e-3])), measured(gradient=torch.tensor([1e-4, 0, 0, 1e-3]))
    difference = worst(compare(other, baseline))
    assert (difference.where, difference.quantity) == ("b.weight", "gradients")
    assert difference.relative == pytest.approx(0.1) and difference.absolute == pytest.approx(1e-4)


def test_a_tensor_of_zeros_must_stay_one() -> None:
    zeros, noise = measured(gradient=0 * ONES), measured(gradient=1e-12 * ONES)
    assert all(d.agrees for d in compare(zeros, zeros))
    assert worst(compare(noise, zeros)).relative == math.inf


def test_copies_that_disagree_are_found_where_the_first_one_is_right() -> None:
    assert found(spread=0.25) == {"policy gradients, copies b.weight": 0.25}


@pytest.mark.parametrize("where", ["logprobs", "loss", "values", "gradient"])
def test_nan_never_agrees(where: str) -> None:
    poisoned = ONES.clone()
    poisoned[1] = math.nan
    differing = [d for d in compare(measured(**{where: poisoned}), measured()) if not d.agrees]
    assert len(differing) == 1 and math.isnan(differing[0].relative)
    assert first_cause(differing) is differing[0] and "nan" in difference_table(differing)


def test_measurements_of_other_shapes_are_no_measurements_of_the_same_run() -> None:
    with pytest.raises(AssertionError, match="policy logprobs"):
        compare(measured(logprobs=torch.ones(5)), measured())


def test_the_verdict_names_what_the_others_follow_from() -> None:
    """Wrong values make the policy's loss and gradients wrong too, though these differ by more."""
    differences = compare(measured(loss=9 * ONES, gradient=9 * ONES, values=ONES + 1e-3), measured())
    cause = first_cause(differences)
    assert cause is not None and cause.quantity == "values"
    said = verdict(cause, len(differences), {}, in_smaller_layouts=False)
    assert said.startswith("DIFFERS: critic values at step 1 [0]: 1.0e-03 relative (tolerance 1e-05)")
    assert said.endswith("; --bisect measures each feature alone")
    assert verdict(cause, 9, {"tp": None, "cp": cause}, in_smaller_layouts=False).endswith("so it does with cp alone")
    assert "two at a time" in verdict(cause, 9, {"tp": None}, in_smaller_layouts=False)
    agreed = "ok: all 9 quantities agree with those of one rank"
    assert verdict(None, 9, {"tp": None}, in_smaller_layouts=False) == agreed
    assert verdict(None, 9, {}, in_smaller_layouts=True).startswith(f"{agreed}, in smaller layouts than the run's")
