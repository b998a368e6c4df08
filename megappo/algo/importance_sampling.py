"""Importance weights for the difference between the policy that sampled and the one that the update starts from.
The behaviour policy is the sampler's recorded log-prob, the proximal policy the trainer's log-prob of the same tokens before the
update. Their ratio weighs the policy gradient; the ratio of the update itself is against the proximal policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megappo.algo.kl import MAX_LOG_RATIO

DIGITS = ((20, 11), (10, 10), (0, 10))
"""(shift, bits) of the digits of a non-negative fp32 number: its bits, read as an integer, have the same order as the numbers."""


def kth_largest(values: Tensor, k: int, add: Callable[[Tensor], Tensor]) -> float:
    """Find the k-th largest of the values of all ranks, k >= 1; inf if there are fewer. Every rank gets the same number.
    values: [n] fp32 of this rank, >= 0 (less counts as 0), may be empty. add: sums an int64 vector over the ranks. Collective
    over the ranks of `add`: three exchanges of at most 2048 counts."""
    bits = values.float().clamp(min=0.0).view(torch.int32).long()
    found, left = 0, k
    for shift, width in DIGITS:
        here = bits[bits >> (shift + width) == found]
        counts = add(torch.bincount(here >> shift & (1 << width) - 1, minlength=1 << width).cpu())
        from_largest = counts.flip(0).cumsum(0)
        place = int((from_largest < left).sum())  # digits, from the largest, that do not reach the k-th
        if place == len(counts):
            return torch.inf
        left -= int(from_largest[place] - counts[-1 - place])
        found = found << width | (len(counts) - 1 - place)
    return float(torch.tensor(found, dtype=torch.int32).view(torch.float32))


class Correction(NamedTuple):
    """Importance weights and the tokens that they cut."""

    weight: Tensor
    """[T] fp64, 0 outside the mask."""
    cut: Tensor
    """[T] bool, tokens whose ratio was out of bounds."""


def behaviour_ratio(logprob: Tensor, rollout_logprob: Tensor, mask: Tensor, cu_seqlens: Tensor, level: str) -> Tensor:
    """Ratio proximal / behaviour at each sampled token, [T] fp64; 0 where mask [T] is false, even if NaN.
    level: "token" is the token's ratio; "sequence" the product over the sampled tokens of its sequence; "geometric" their
    geometric mean. Log-ratios are clamped to +-20. Raises ValueError for another level."""
    log_ratio = torch.where(mask, logprob.double() - rollout_logprob.double(), 0.0)
    if level in ("sequence", "geometric"):
        columns = torch.stack((log_ratio, mask.double()), 1)
        sums = torch.segment_reduce(columns, "sum", offsets=cu_seqlens.long(), initial=0.0, unsafe=True)
        whole = sums[:, 0] / (sums[:, 1].clamp(min=1.0) if level == "geometric" else 1.0)
        log_ratio = whole.repeat_interleave(cu_seqlens.long().diff(), output_size=mask.numel())
    elif level != "token":
        raise ValueError(f"level {level!r} is not one of token, sequence, geometric")
    return torch.where(mask, log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 0.0)


def importance_weights(ratio: Tensor, mask: Tensor, kind: str, low: float | None, high: float) -> Correction:
    """Weights [T] from ratios of `behaviour_ratio`. Raises ValueError for another kind.

    tis: min(ratio, high) (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"). mis: the
    ratio up to `high`, 0 above (Liu et al. 2025, "When Speed Kills Stability"). icepop: the ratio from `low` to `high`, 0 outside
    (Ring-1T, arXiv:2510.18855).
    """
    if kind not in ("tis", "mis", "icepop"):
        raise ValueError(f"correction {kind!r} is not one of tis, mis, icepop")
    cut = ratio > high
    if kind == "icepop":
        assert low is not None, "icepop has a lower bound"
        cut = cut | (ratio < low)
    bounded = ratio.clamp(max=high) if kind == "tis" else torch.where(cut, 0.0, ratio)
    return Correction(torch.where(mask, bounded, 0.0), cut & mask)
