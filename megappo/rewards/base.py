"""Interface of a reward rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class RewardInput:
    """One finished response. record: the data record of the prompt. num_tokens: sampled tokens."""

    prompt: str
    response: str
    answer: str
    truncated: bool
    num_tokens: int
    record: Mapping[str, Any]
    sample_id: str


class RewardRule(Protocol):
    """Rule: response -> finite number. It may raise; the caller names the sample and stops all ranks."""

    def __call__(self, sample: RewardInput) -> float: ...
