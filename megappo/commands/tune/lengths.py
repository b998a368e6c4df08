"""Lengths of the responses of a step: those that a run drew, or a lognormal distribution cut at the limit.

A step waits for its longest responses, and attention works on long ones: their mean says little about either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log
from statistics import NormalDist
from typing import NamedTuple

SPREAD = 0.85  # standard deviation of the logarithm, of answers to mathematical problems by models that were tuned to instructions
MOST_SPREAD = 3.0  # a tenth of the responses would be 47 times as long as the median
_NORMAL = NormalDist()
_POINTS = 256  # of the distribution, for its moments


class Turns(NamedTuple):
    """Work of an environment in a trajectory, on average, and how a rank asks it (`rollout.environment`)."""

    count: float
    """Turns of the policy."""
    observed: float
    """Tokens of all observations."""
    seconds: float
    """Of one answer."""
    workers: int = 0
    """Processes that answer beside the engine; 0: the engine waits for every answer."""
    together: bool = True
    """True if nothing goes on before all are answered."""

    @property
    def whole(self) -> int:
        return max(1, round(self.count))

    @property
    def observed_in_turn(self) -> float:
        return self.observed / max(1, self.whole - 1)

    @property
    def answer_s(self) -> float:
        """Seconds of an answer of a trajectory with a whole number of turns."""
        return self.seconds * (self.count - 1) / max(1, self.whole - 1)


@dataclass(frozen=True)
class Lengths:
    """Tokens of a response: a distribution of which every step draws anew."""

    mean: float
    longest: float
    """The limit, at which longer ones are cut."""
    spread: float = 0.0
    """Standard deviation of the logarithm of the lengths before they are cut; 0: all have the mean length."""
    seen: tuple[float, ...] = ()
    """Lengths of a run, in ascending order, in place of a lognormal distribution."""

    def cut(self, longest: float) -> Lengths:
        """The lengths under another limit. The mean of a lognormal distribution stays, if the limit allows."""
        if self.seen:
            return seen_lengths(self.seen, longest)
        return Lengths(min(self.mean, longest), longest, self.spread)

    def quantile(self, share: float) -> float:
        """The length that this share of the responses does not exceed. share: above 0 and below 1."""
        if self.seen:
            return self.seen[min(len(self.seen) - 1, int(share * len(self.seen)))]
        if not self.spread or self.mean >= self.longest:
            return self.mean
        return max(1.0, min(self.longest, self._median * exp(self.spread * _NORMAL.inv_cdf(share))))

    @cached_property
    def _median(self) -> float:
        """Median of the distribution whose mean, once it is cut, is `mean`."""
        s = self.spread

        def mean_of(median: float) -> float:
            cut = log(self.longest / median)
            below = median * exp(s * s / 2) * _NORMAL.cdf((cut - s * s) / s)
            return below + self.longest * (1 - _NORMAL.cdf(cut / s))

        low, high = self.mean * exp(-s * s), self.mean
        while mean_of(high) < self.mean * (1 - 1e-9) and high < 1e9 * self.longest:
            high *= 2
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if mean_of(middle) < self.mean else (low, middle)
        return high

    def of_replica(self, count: int, replicas: int) -> list[float]:
        """Lengths of the `count` responses of the replica with the longest of all, of so many replicas. Long and short ones follow
        each other, as they do in a queue, and always in the same way."""
        found = [self.quantile(1 - (at * replicas + 0.5) / (count * replicas)) for at in range(count)]
        # Multiples of the golden ratio are spread evenly over the queue, whatever their number.
        return [found[at] for at in sorted(range(count), key=lambda at: (at + 1) * 0.6180339887 % 1)]

    @cached_property
    def square(self) -> float:
        """Mean of the squares."""
        if not self.spread and not self.seen:
            return self.mean**2
        return sum(self.quantile((at + 0.5) / _POINTS) ** 2 for at in range(_POINTS)) / _POINTS


def seen_lengths(lengths: Sequence[float], longest: float) -> Lengths:
    """The lengths of a run's responses. longest: the limit of the run to be priced."""
    ordered = tuple(sorted(max(1.0, min(float(one), longest)) for one in lengths))
    return Lengths(sum(ordered) / len(ordered), longest, seen=ordered)
