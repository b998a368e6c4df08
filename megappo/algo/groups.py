"""Advantages of responses by comparison within their group, the responses to one prompt: GRPO and RLOO.
All take one number per response, [N]; every token of a response has its advantage. Groups may have different sizes and any
order. fp64, since differences of rewards may be small beside the rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the standard deviation of a group (verl, NeMo-RL; TRL has 1e-4), so that equal rewards give 0 and not noise."""


class GroupMoments(NamedTuple):
    """Size of each response's group, mean and standard deviation of its rewards, [N] fp64 each. std divides by size - 1, 0 in a
    group of one."""

    size: Tensor
    mean: Tensor
    std: Tensor


def group_moments(reward: Tensor, group: Tensor) -> GroupMoments:
    """Moments of groups. reward: [N], summed over the tokens of a response. group: [N] int, equal for responses to one prompt."""
    exact = reward.double()
    _, member = torch.unique(group, return_inverse=True)
    size = torch.bincount(member).double()
    # Squares of differences from the mean: equal rewards differ from it by their own rounding alone.
    mean = torch.zeros_like(size).index_add_(0, member, exact) / size
    squares = torch.zeros_like(size).index_add_(0, member, (exact - mean[member]).square())
    std = (squares / (size - 1.0).clamp(min=1.0)).sqrt()
    return GroupMoments(size[member], mean[member], std[member])


def grpo_advantages(reward: Tensor, group: Tensor, *, divide_by_group_std: bool = True) -> Tensor:
    """GRPO's advantages, [N] fp64: (R - mean) / (std + EPSILON) of the group (Shao et al. 2024, arXiv:2402.03300, 4.1.2).
    divide_by_group_std false is Dr. GRPO (Liu et al. 2025, arXiv:2503.20783). 0 in a group of one. Arguments as `group_moments`."""
    _, mean, std = group_moments(reward, group)
    centred = reward.double() - mean
    return centred / (std + EPSILON) if divide_by_group_std else centred


def rloo_advantages(reward: Tensor, group: Tensor) -> Tensor:
    """RLOO's advantages, [N] fp64: R minus the mean of the group's other responses (Ahmadian et al. 2024, arXiv:2402.14740, eq. 8).
    That equals size / (size - 1) * (R - mean); 0 in a group of one. Arguments as `group_moments`."""
    size, mean, _ = group_moments(reward, group)
    return size / (size - 1.0).clamp(min=1.0) * (reward.double() - mean)


COMPARISONS: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "grpo": lambda reward, group, section: grpo_advantages(reward, group, divide_by_group_std=section.divide_by_group_std),
    "rloo": lambda reward, group, _: rloo_advantages(reward, group),
}
"""Name of an estimator that compares groups -> its formula of reward, group and the estimator's section."""


def equal_groups(reward: Tensor, group: Tensor) -> float:
    """Share of the groups whose rewards are all equal, from which group advantages learn nothing. 0 without groups."""
    equal = are_equal(reward, group)
    return float(equal.double().mean()) if len(equal) else 0.0


def are_equal(reward: Tensor, group: Tensor) -> Tensor:
    """True for each group whose rewards are all equal, [G] bool in ascending order of group. Arguments as `group_moments`; NaN is
    no reward, and a group of fewer than two others is equal."""
    names, member = torch.unique(group, return_inverse=True)
    there = ~reward.isnan()
    member, exact = member[there], reward[there].double()
    largest = torch.full((len(names),), -torch.inf, dtype=torch.float64).scatter_reduce_(0, member, exact, "amax")
    smallest = torch.full((len(names),), torch.inf, dtype=torch.float64).scatter_reduce_(0, member, exact, "amin")
    return largest <= smallest
