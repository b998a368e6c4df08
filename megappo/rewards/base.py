"""Interface of a reward rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class RewardInput:
    """One finished response.

    response: its text before the end-of-sequence token and the first of `rollout.stop`. record: the data record of the prompt.
    truncated: cut by the length limit. num_tokens: sampled tokens. full_response: the text with the stop string and special tokens.
    tokens: the sampled ids.
    """

    prompt: str
    response: str
    answer: str
    truncated: bool
    num_tokens: int
    record: Mapping[str, Any]
    sample_id: str
    full_response: str = ""
    tokens: tuple[int, ...] = ()


class UnusableAnswer(ValueError):
    """A rule cannot read the reference answer of a sample: a fault of the data. The sample scores 0 and is counted."""


class RewardRule(Protocol):
    """Rule: response -> finite number, or {"score": number, "parts": {name: number}}, or None for undecided: scored 0 and counted.

    `UnusableAnswer` scores 0 and is counted too; after any other exception the caller names the sample and stops all ranks.
    """

    def __call__(self, sample: RewardInput) -> float | Mapping[str, Any] | None: ...
