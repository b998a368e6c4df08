"""Negative controls: every mistake of `faults.py` turns the comparison red, and by far more than the tolerance."""

from __future__ import annotations

import pytest
import torch

from megappo.commands.verify.compare import Difference, compare
from megappo.commands.verify.measure import Measured, RoleMeasures
from tests.parity.faults import BEFORE_UPDATES, BETWEEN, SHARED
from tests.parity.oracle import Outcome
from tests.parity.test_layouts import BASELINE
from tests.parity.test_oracle import TOLERANCE, relative


def from_the_oracle(found: Measured, expected: Outcome, role: str, quantity: str) -> float:
    """As `test_oracle.differences`, of one field."""
    return relative(found[role].values[quantity][0], torch.cat(expected.fields[quantity]))


def from_one_rank(found: Measured, alone: Measured, role: str, quantity: str) -> Difference:
    """The difference of one quantity: others were measured only as far as it needs them."""
    expected = alone[role]
    if quantity in BEFORE_UPDATES:
        expected = RoleMeasures({quantity: expected.values[quantity]})
    (difference,) = (d for d in compare({role: found[role]}, {role: expected}) if d.quantity == quantity)
    return difference


@pytest.mark.parametrize("fault", SHARED)
def test_a_mistake_in_every_layout_is_noticed_by_the_step_written_out(faulty, measured, expected, fault: str) -> None:
    assert from_the_oracle(faulty[fault], expected["llama"], *SHARED[fault]) > 100 * TOLERANCE
    assert from_the_oracle(measured[1]["llama"][BASELINE], expected["llama"], *SHARED[fault]) <= TOLERANCE, "without it"


@pytest.mark.parametrize("fault", BETWEEN)
def test_a_mistake_in_one_layout_is_noticed_between_layouts(faulty, measured, fault: str) -> None:
    model, _, of = BETWEEN[fault]
    difference = from_one_rank(faulty[fault], measured[1][model][BASELINE], *of)
    assert difference.relative > 100 * difference.tolerance


def test_no_right_shift_is_invisible_between_layouts(faulty, measured) -> None:
    """Reason for the step written out: its gradients are finite, its loss falls, and every layout would agree with it."""
    found, alone = faulty["no right shift"], measured[1]["llama"][BASELINE]
    assert from_one_rank(found, alone, "policy", "logprobs").agrees and not from_one_rank(found, alone, "critic", "values").agrees
