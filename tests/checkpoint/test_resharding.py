"""What one layout writes another one reads, weights and optimizer alike. The cases run in `resharding.py`, on the store's two ranks."""

from __future__ import annotations

import pytest

from .resharding import CHAINS


@pytest.mark.parametrize("name", CHAINS)
def test_weights_and_optimizer_survive_a_chain_of_layouts(world, name):
    """Every weight, main parameter, moment and the step, after every hop, to the bit."""
    kinds = {"weight", "exp_avg", "exp_avg_sq", "step"} | ({"main"} if "bf16" in name else set())
    for rank in world:
        result = rank[f"reshard {name}"]
        assert result["wrong"] == []
        assert result["own"] == []
        # The oracle looked at everything, and at the right places: bf16 weights are their main parameters, rounded.
        assert {part.split()[0] for part in result["parts"]} == kinds
        experts = [part for part in result["parts"] if part.startswith("exp_avg_sq") and ".experts." in part]
        assert len(experts) == (2 * 4 * 3 if "experts" in name else 0)  # layers x experts x matrices
        assert result["main is not rounded to weight"] == []


@pytest.mark.parametrize(
    ("mistake", "start", "inside"),
    [
        ("experts shifted by one", "weight ", ".mlp.experts."),
        ("layers swapped", "weight model.layers.", ""),
        ("moments of two experts swapped", "exp_avg ", "down_proj"),
        ("step of the experts forgotten", "step", ""),
    ],
)
def test_the_comparison_notices_what_lands_in_the_wrong_place(world, mistake, start, inside):
    for rank in world:
        assert rank["spoiled loads"]["none"] == []
        wrong = rank["spoiled loads"][mistake]
        assert wrong and all(part.startswith(start) and inside in part for part in wrong)
