"""Another layout reads a checkpoint, weights and optimizer alike. The cases run in `resharding.py`, in the store's world."""

from __future__ import annotations

import pytest

from tests.checkpoint.resharding import CHAINS, HEAD, OUTPUT


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
        ("step forgotten", "step", ""),
    ],
)
def test_the_comparison_notices_what_lands_in_the_wrong_place(world, mistake, start, inside):
    for rank in world:
        assert rank["spoiled loads"]["none"] == []
        wrong = rank["spoiled loads"][mistake]
        assert wrong and all(part.startswith(start) and inside in part for part in wrong)


def test_a_critic_starts_from_another_runs_critic_or_policy(world):
    """bf16 with experts (policy ep2, critic pp2 vpp2) into an fp32 critic on cp2, and into a bf16 critic on an uneven split."""
    for rank in world:
        result = rank["critic from checkpoint"]
        assert result["critic"] == []
        assert result["policy"] == [OUTPUT, HEAD]  # each has one of the two, everything else is equal
        assert result["head"]  # as it was made before the load
        assert result["mains"] > 60 and result["main"] == []  # the optimizer goes on from the weights that were loaded
        assert result["moments"] == 0
        # Negative control.
        assert any(".mlp.experts." in name for name in result["shifted"])


def test_a_critic_is_refused_what_does_not_fit(world):
    for rank in world:
        unfit = rank["critic from checkpoint"]["unfit"]
        assert "only the model has score.weight" in unfit["policy with head"]
        assert "only the model has" in unfit["dense"] and "mlp" in unfit["dense"]
        assert "holds no reward" in unfit["absent"]
        assert not any("\n" in text for text in unfit.values())
