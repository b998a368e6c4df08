"""Short way to write a finished response."""

from __future__ import annotations

from megappo.rewards.base import RewardInput


def sample(response: str, answer: str = "", *, truncated: bool = False, num_tokens: int = 1, sample_id: str = "t#0") -> RewardInput:
    return RewardInput("q", response, answer, truncated, num_tokens, {}, sample_id)
