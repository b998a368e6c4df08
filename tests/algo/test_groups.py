"""GRPO and RLOO against loops in Python floats, and against the formulas of TRL, verl and NeMo-RL, derived by hand.

Versions read: TRL 1.10.0.dev0 (`GRPOTrainer`: std over the group, unbiased, + 1e-4; `RLOOTrainer`: baseline (sum - own) / (n - 1)),
verl 0.8.0.dev (`core_algos.compute_grpo_outcome_advantage`, + 1e-6; `compute_rloo_outcome_advantage`: n / (n - 1) of the score less
n / (n - 1) of the mean), NeMo-RL 0.6.0 (`GRPOAdvantageEstimator` without `leave_one_out_baseline`, + 1e-6).
"""

import math
import random

import pytest
import torch

from megappo.algo.groups import EPSILON, equal_groups, grpo_advantages, rloo_advantages

# Groups of 4, 3, 2 and 1 responses, none of which are neighbours; the last group's rewards are all equal.
GROUP = [7, 2, 7, 9, 2, 7, 4, 9, 2, 7, 5, 5, 5]


def rewards(seed=0):
    draw = random.Random(seed)
    return [draw.choice([0.0, 0.1, 1.0, -0.7]) if name != 5 else 0.1 for name in GROUP]


def members_of(i):
    return [j for j, name in enumerate(GROUP) if name == GROUP[i]]


def grpo_by_hand(reward, epsilon=EPSILON, divide=True):
    found = []
    for i, own in enumerate(reward):
        group = [reward[j] for j in members_of(i)]
        mean = math.fsum(group) / len(group)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in group) / (len(group) - 1)) if len(group) > 1 else 0.0
        found.append((own - mean) / (std + epsilon) if divide else own - mean)
    return found


def rloo_by_hand(reward):
    found = []
    for i, own in enumerate(reward):
        others = [reward[j] for j in members_of(i) if j != i]
        found.append(own - math.fsum(others) / len(others) if others else 0.0)
    return found


def rloo_as_in_verl(reward):
    found = []
    for i, own in enumerate(reward):
        group = [reward[j] for j in members_of(i)]
        n = len(group)
        found.append(own * n / (n - 1) - math.fsum(group) / n * n / (n - 1) if n > 1 else 0.0)
    return found


def close(found, want):
    return bool((found - torch.tensor(want, dtype=torch.float64)).abs().max() < 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_advantages_are_those_of_the_loops(seed):
    reward = rewards(seed)
    of = torch.tensor(reward, dtype=torch.float64), torch.tensor(GROUP, dtype=torch.int32)
    assert close(grpo_advantages(*of), grpo_by_hand(reward))
    assert close(grpo_advantages(*of, divide_by_group_std=False), grpo_by_hand(reward, divide=False))
    assert close(rloo_advantages(*of), rloo_by_hand(reward))
    assert close(rloo_advantages(*of), rloo_as_in_verl(reward))
    assert not close(grpo_advantages(*of), rloo_by_hand(reward)), "they differ"


def test_trls_epsilon_is_the_only_difference_to_trl():
    reward = rewards()
    found = grpo_advantages(torch.tensor(reward, dtype=torch.float64), torch.tensor(GROUP))
    assert (found - torch.tensor(grpo_by_hand(reward, epsilon=1e-4), dtype=torch.float64)).abs().max() < 1e-3


def test_the_wrong_group_is_noticed():
    """Negative control: neighbours taken for a group, as an order of the batch would have it."""
    reward = rewards()
    neighbours = torch.arange(len(GROUP)) // 4
    assert not close(grpo_advantages(torch.tensor(reward, dtype=torch.float64), neighbours), grpo_by_hand(reward))


def test_neither_the_order_nor_the_names_of_groups_count():
    reward, group = torch.tensor(rewards(), dtype=torch.float64), torch.tensor(GROUP)
    order = torch.randperm(len(GROUP), generator=torch.Generator().manual_seed(1))
    for advantages in (grpo_advantages, rloo_advantages):
        torch.testing.assert_close(advantages(reward[order], group[order]), advantages(reward, group)[order], rtol=0, atol=1e-12)
        torch.testing.assert_close(advantages(reward, 100 - group), advantages(reward, group), rtol=0, atol=1e-12)


def test_equal_rewards_are_no_noise_over_noise():
    """0.1 is no binary fraction: the mean of three is not 0.1."""
    found = grpo_advantages(torch.tensor(rewards(), dtype=torch.float64), torch.tensor(GROUP))
    assert float(found[-3:].abs().max()) < 1e-9


@pytest.mark.parametrize("advantages", [grpo_advantages, rloo_advantages])
def test_no_samples_and_groups_of_one(advantages):
    assert advantages(torch.empty(0), torch.empty(0, dtype=torch.int32)).shape == (0,)
    assert advantages(torch.tensor([3.0, -1.0]), torch.tensor([0, 1])).tolist() == [0.0, 0.0]


def test_equal_groups_are_counted_once_each():
    group = torch.tensor([3, 3, 1, 1, 2, 2, 2])
    assert equal_groups(torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5, 0.5, 0.5]), group) == pytest.approx(2 / 3)
    assert equal_groups(torch.empty(0), torch.empty(0, dtype=torch.long)) == 0.0
