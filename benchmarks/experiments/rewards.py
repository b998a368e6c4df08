"""Rewards of the tasks of `tasks.py`, loaded by path (`reward.parts`): each scores a whole response, at its end.

Imports nothing beside it: a run hashes this file alone.
"""

from __future__ import annotations

from typing import Any


def doubled(sample: Any, digits: int, count: int) -> float:
    """Share of the `count` numbers of `digits` digits, each written from the last digit on, that are twice the one before modulo
    10^digits; 0 for a response of another length."""
    text = sample.prompt.removeprefix("=") + sample.response
    if len(text) != digits * (count + 1) or not text.isdigit():
        return 0.0
    numbers = [int(text[i : i + digits][::-1]) for i in range(0, len(text), digits)]
    return sum(after == 2 * before % 10**digits for before, after in zip(numbers, numbers[1:])) / count


def both_turns(sample: Any) -> float:
    """1 if the whole trajectory, what was given between the turns included, is the answer."""
    return float(sample.full_response.removesuffix("</s>") == sample.answer)
