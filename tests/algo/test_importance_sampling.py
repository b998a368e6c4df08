"""Importance weights against loops in Python floats, with bounds at each level.

The formulas are also those of verl 0.8.0.dev (`rollout_is` of token or sequence, bounded above; its rejection, `rollout_rs`,
changes the denominator too, these do not) and NeMo-RL 0.6.0 (`truncated_importance_sampling_type` tis, icepop).
"""

import math
import random

import pytest
import torch

from megappo.algo.importance_sampling import behaviour_ratio, importance_weights
from megappo.data.packing import cu_seqlens_of

LENGTHS = [4, 0, 6, 2, 3]
MASK = [0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 0, 0, 1, 0, 1]


def case(seed):
    draw = random.Random(seed)
    rollout = [-draw.random() for _ in MASK]
    logprob = [x + draw.gauss(0, 0.7) for x in rollout]
    mask = torch.tensor(MASK, dtype=torch.bool)
    return *(torch.where(mask, torch.tensor(x), torch.nan) for x in (logprob, rollout)), mask, cu_seqlens_of(LENGTHS)


def ratios_by_hand(logprob, rollout, level):
    found, start = [0.0] * len(MASK), 0
    for length in LENGTHS:
        places = [t for t in range(start, start + length) if MASK[t]]
        each = {t: float(logprob[t]) - float(rollout[t]) for t in places}
        whole = math.fsum(each.values())
        for t in places:
            found[t] = math.exp({"token": each[t], "sequence": whole, "geometric": whole / len(places)}[level])
        start += length
    return found


BOUNDS = {
    "tis": lambda r, low, high: min(r, high),
    "mis": lambda r, low, high: r if r <= high else 0.0,
    "icepop": lambda r, low, high: r if low <= r <= high else 0.0,
}


def test_weights_are_those_of_the_loops():
    for seed in range(3):
        for kind in BOUNDS:
            for level in ["token", "sequence", "geometric"]:
                logprob, rollout, mask, cu = case(seed)
                want = ratios_by_hand(logprob, rollout, level)
                ratio = behaviour_ratio(logprob, rollout, mask, cu, level)
                torch.testing.assert_close(ratio, torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-7)
                found = importance_weights(ratio, mask, kind, 0.7, 1.4)
                wanted = [BOUNDS[kind](r, 0.7, 1.4) if m else 0.0 for r, m in zip(want, MASK)]
                torch.testing.assert_close(found.weight, torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=1e-7)
                assert found.cut.tolist() == [bool(m) and (r > 1.4 or (kind == "icepop" and r < 0.7)) for r, m in zip(want, MASK)]


def test_the_bounds_bite():
    ratios = [r for seed in range(3) for r, m in zip(ratios_by_hand(*case(seed)[:2], "token"), MASK) if m]
    assert any(r > 1.4 for r in ratios) and any(r < 0.7 for r in ratios) and any(0.7 < r < 1.4 for r in ratios)


def test_the_proximal_policy_in_place_of_the_behaviour_policy_is_noticed():
    """Negative control: its ratio to itself is 1, and nothing is corrected."""
    logprob, _, mask, cu = case(0)
    wrong = behaviour_ratio(logprob, logprob, mask, cu, "token")
    assert torch.equal(wrong[mask], torch.ones(int(mask.sum()), dtype=torch.float64))
    assert (wrong - torch.tensor(ratios_by_hand(*case(0)[:2], "token"))).abs().max() > 0.1


def test_unknown_names_are_refused():
    logprob, rollout, mask, cu = case(0)
    with pytest.raises(ValueError, match="token, sequence, geometric"):
        behaviour_ratio(logprob, rollout, mask, cu, "turn")
    with pytest.raises(ValueError, match="tis, mis, icepop"):
        importance_weights(rollout.double(), mask, "dis", None, 2.0)


def test_no_tokens():
    nothing = torch.empty(0)
    for level in ("token", "sequence", "geometric"):
        assert behaviour_ratio(nothing, nothing, nothing.bool(), torch.zeros(1, dtype=torch.int32), level).shape == (0,)
