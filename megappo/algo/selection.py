"""The k-th largest of numbers that lie on several ranks, exactly, from counts that add."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

DIGITS = ((20, 11), (10, 10), (0, 10))
"""(shift, bits) of the parts of a non-negative fp32 number, whose bits are ordered as the number is."""


def kth_largest(values: Tensor, k: int, add: Callable[[Tensor], Tensor]) -> float:
    """The k-th largest of the values of all ranks, k >= 1 counted from the largest; inf if there are fewer.

    values: [n] fp32, >= 0 (less counts as 0), of this rank, which may have none. add: sum of an int64 vector over the ranks: three
    exchanges of at most 2048 counts. Every rank gets the same number.
    """
    bits = values.float().clamp(min=0.0).view(torch.int32).long()
    found, left = 0, k
    for shift, width in DIGITS:
        here = bits[bits >> (shift + width) == found]
        counts = add(torch.bincount(here >> shift & (1 << width) - 1, minlength=1 << width))
        from_largest = counts.flip(0).cumsum(0)
        place = int((from_largest < left).sum())  # digits, from the largest, that do not reach the k-th
        if place == len(counts):
            return torch.inf
        left -= int(from_largest[place] - counts[-1 - place])
        found = found << width | (len(counts) - 1 - place)
    return float(torch.tensor(found, dtype=torch.int32).view(torch.float32))
