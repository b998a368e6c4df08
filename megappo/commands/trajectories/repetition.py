"""Repetition within a response, on token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NGRAM = 4  # shorter ones repeat in any text, longer ones only in copies
LEAST_REPEATS = 3  # of a block at the end of a response for a loop
SHORTEST_LOOP = 8  # tokens in all: the digits of 1000 are no loop


@dataclass(frozen=True)
class Loop:
    """A response's end that repeats one block. tokens: covered by all its repeats. period: tokens of the block."""

    tokens: int
    period: int


def ngrams(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[start:] for start in range(n))))


def repeated_share(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Share of the n-grams that occurred before in the same response (rep-n of Welleck et al. 2020); 0 if there are none."""
    all_of_them = ngrams(tokens, n)
    return 1 - len(set(all_of_them)) / len(all_of_them) if all_of_them else 0.0


def tail_loop(tokens: Sequence[int]) -> Loop | None:
    """The longest loop that the response ends in, by its shortest block; None without one."""
    backwards = list(reversed(tokens))
    best: Loop | None = None
    for period, same in enumerate(_prefix_matches(backwards)):
        covered = period + same
        if period and covered >= max(LEAST_REPEATS * period, SHORTEST_LOOP) and (best is None or covered > best.tokens):
            best = Loop(covered, period)
    return best


def _prefix_matches(items: Sequence[int]) -> list[int]:
    """For every i the length of the longest common prefix of items and items[i:] (the Z function), in linear time."""
    count = len(items)
    matches = [0] * count
    left = right = 0
    for i in range(1, count):
        length = min(right - i, matches[i - left]) if i < right else 0
        while i + length < count and items[length] == items[i + length]:
            length += 1
        matches[i] = length
        if i + length > right:
            left, right = i, i + length
    return matches
