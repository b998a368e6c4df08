"""V-trace against its sum over products in Python floats (Espeholt et al. 2018, eq. 1), and against GAE on policy."""

import math
import random

import pytest
import torch

from megappo.algo.gae import vtrace_advantages, vtrace_weights
from megappo.ops.advantages import Discount, Rewards, TimeSteps, token_advantages

# Masks of the sequences: gaps, one without a sampled token, an empty one.
MASKS = [[0, 1, 1, 0, 1], [0, 0], [1], [], [0, 1, 0, 0, 1, 1, 1, 0]]
BOOTSTRAP = [0.7, 5.0, -0.4, 2.0, 0.0]
GAMMA = 0.9


def vtrace(reward, value, ratio, mask, cu_seqlens, bootstrap, *, rho_bar, c_bar, gamma, lam_policy, lam_value):
    """(advantage, returns) by the fused op, as stage 5 makes them."""
    weight, trace = vtrace_weights(ratio, mask, cu_seqlens, rho_bar=rho_bar, c_bar=c_bar)
    nothing, score = torch.zeros(value.shape), torch.zeros(len(cu_seqlens) - 1)
    given = value, mask, cu_seqlens, bootstrap, Discount(gamma, lam_policy, lam_value), TimeSteps(None, weight, trace)
    _, correction, returns, _ = token_advantages(Rewards(nothing, None, score, reward), *given)
    return vtrace_advantages(correction, weight, trace, mask, cu_seqlens, gamma, lam_policy), returns


def case(seed):
    draw = random.Random(seed)
    mask = torch.tensor([flag for one in MASKS for flag in one], dtype=torch.bool)
    columns = [[draw.gauss(0, 1) for _ in mask], [draw.gauss(0, 1) for _ in mask], [math.exp(draw.gauss(0, 0.7)) for _ in mask]]
    # nothing outside the mask may be read
    reward, value, ratio = (torch.where(mask, torch.tensor(x, dtype=torch.float64), torch.nan) for x in columns)
    return reward, value, ratio, mask, torch.tensor([0, *(len(one) for one in MASKS)]).cumsum(0), torch.tensor(BOOTSTRAP)


def by_hand(reward, value, ratio, mask, cu_seqlens, bootstrap, rho_bar, c_bar, lam_policy, lam_value):
    """(advantage, returns): every target is summed anew over all later tokens."""
    advantage, returns = [0.0] * len(mask), [0.0] * len(mask)
    cuts = cu_seqlens.tolist()
    for b, (begin, end) in enumerate(zip(cuts, cuts[1:])):
        places = [t for t in range(begin, end) if mask[t]]
        values = [float(value[t]) for t in places] + [0.0 if bootstrap is None else float(bootstrap[b])]
        w = [float(ratio[t]) for t in places]
        delta = [float(reward[t]) + GAMMA * values[k + 1] - values[k] for k, t in enumerate(places)]

        def target(s, lam):
            if s == len(places):
                return values[s]
            terms = [
                GAMMA ** (k - s) * math.prod(lam * min(c_bar, w[i]) for i in range(s, k)) * min(rho_bar, w[k]) * delta[k]
                for k in range(s, len(places))
            ]
            return values[s] + math.fsum(terms)

        for s, t in enumerate(places):
            lam_p, lam_v = (lam[b] if isinstance(lam, list) else lam for lam in (lam_policy, lam_value))
            after = lam_p * target(s + 1, lam_p) + (1 - lam_p) * values[s + 1]
            advantage[t] = min(rho_bar, w[s]) * (float(reward[t]) + GAMMA * after - values[s])
            returns[t] = target(s, lam_v)
    return torch.tensor(advantage), torch.tensor(returns)


CASES = [
    {"rho_bar": 1.0, "c_bar": 1.0, "lam_policy": 1.0, "lam_value": 1.0},
    {"rho_bar": 2.0, "c_bar": 0.5, "lam_policy": 0.8, "lam_value": 1.0},
    {"rho_bar": 1e9, "c_bar": 1e9, "lam_policy": [0.9, 0.1, 0.5, 0.3, 0.7], "lam_value": 0.95},
]


def found(given, bootstrap, settings):
    lams = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in settings.items() if name.startswith("lam")}
    return vtrace(*given[:-1], bootstrap, gamma=GAMMA, **{**settings, **lams})


@pytest.mark.parametrize("bootstrapped", [False, True])
@pytest.mark.parametrize("settings", CASES, ids=range(len(CASES)))
def test_targets_are_those_of_the_paper(settings, bootstrapped):
    given = case(1)
    bootstrap = given[-1] if bootstrapped else None
    want = by_hand(*given[:-1], bootstrap, **settings)
    for mine, hand in zip(found(given, bootstrap, settings), want, strict=True):
        torch.testing.assert_close(mine, hand, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("broken", [{"rho_bar": 1.0}, {"c_bar": 1.0}, {"lam_policy": 1.0}, {"lam_value": 0.8}])
def test_a_setting_that_is_ignored_is_noticed(broken):
    """Negative control."""
    given, settings = case(1), CASES[1]
    want = by_hand(*given, **settings)
    other = found(given, given[-1], settings | broken)
    assert max(float((a - b).abs().max()) for a, b in zip(other, want)) > 1e-2


@pytest.mark.parametrize("lam", [0.6, 1.0])
def test_under_equal_bounds_the_scan_has_the_advantages_themselves(lam):
    reward, value, ratio, mask, cu_seqlens, bootstrap = case(3)
    weight, trace = vtrace_weights(ratio, mask, cu_seqlens, rho_bar=1.2, c_bar=1.2)
    assert (trace == 1).all() and bool((weight[mask] <= 1.2).all()) and float(weight[mask].max()) == 1.2
    correction = torch.where(mask, value, 0.0).float()
    assert torch.equal(vtrace_advantages(correction, weight, trace, mask, cu_seqlens, GAMMA, lam), correction)


def test_a_ratio_of_zero_ends_the_trace_and_gives_no_nan():
    """A token that the trainer's policy would never draw: the sampler's bits and its own differ that much."""
    reward, value, ratio, mask, cu_seqlens, bootstrap = case(4)
    ratio[2] = 0.0
    settings = {"rho_bar": 1.0, "c_bar": 0.5, "lam_policy": 0.9, "lam_value": 0.9}
    mine = vtrace(reward, value, ratio, mask, cu_seqlens, bootstrap, **settings, gamma=GAMMA)
    for one, hand in zip(mine, by_hand(reward, value, ratio, mask, cu_seqlens, bootstrap, **settings), strict=True):
        torch.testing.assert_close(one, hand, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lam_policy, lam_value", [(1.0, 1.0), (0.8, 0.95), ([0.9, 0.1, 0.5, 0.3, 0.7], 1.0)])
def test_on_policy_it_is_gae(lam_policy, lam_value):
    reward, value, ratio, mask, cu_seqlens, bootstrap = case(2)
    reward, value = reward.float(), value.float()  # as the op takes them
    lams = {"lam_policy": torch.tensor(lam_policy) if isinstance(lam_policy, list) else lam_policy, "lam_value": lam_value}
    # log-probs, whose place is the first, are not read without a reference
    rewards = Rewards(value, None, torch.zeros(len(MASKS)), reward)
    _, *want, _ = token_advantages(rewards, value, mask, cu_seqlens, bootstrap, Discount(GAMMA, **lams))
    settings = {"rho_bar": 1.0, "c_bar": 1.0, **lams, "gamma": GAMMA}
    on_policy = vtrace(reward, value, torch.ones_like(value), mask, cu_seqlens, bootstrap, **settings)
    for mine, other in zip(on_policy, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    off_policy = vtrace(reward, value, ratio, mask, cu_seqlens, bootstrap, **settings)
    assert (off_policy[1] - want[1]).abs().max() > 1e-2


def test_a_batch_without_a_token_has_no_advantage():
    nothing, mask = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    settings = {"rho_bar": 1.0, "c_bar": 1.0, "gamma": 1.0, "lam_policy": 1.0, "lam_value": 1.0}
    assert [x.shape for x in vtrace(nothing, nothing, nothing, mask, torch.tensor([0]), None, **settings)] == [(0,), (0,)]
