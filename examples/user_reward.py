"""A reward of your own: functions of a file that the configuration names. Nothing of megappo needs to change.

    scripts/quickstart.sh        # once: makes the model and the data that configs/quickstart.yaml names
    megappo train configs/quickstart.yaml run.name=user_reward \\
        'reward.parts=[{name: exact_match}, {path: examples/user_reward.py, function: close, weight: 0.5}]'

docs/rewards.md has everything that a reward sees and may return.
"""

from __future__ import annotations

from collections.abc import Sequence

from megappo.rewards.base import RewardInput


def close(sample: RewardInput) -> float:
    """Share of characters that are those of the answer, at the same place; 0 for an answer of another length."""
    response = sample.response.strip()
    if len(response) != len(sample.answer):
        return 0.0
    return sum(a == b for a, b in zip(response, sample.answer)) / len(sample.answer)


close.requires = ("answer",)  # checked over all records before a model is built: every answer must hold text


def digits(samples: Sequence[RewardInput], wanted: int = 1) -> list[dict]:
    """With `batch: true` and `args: {wanted: 2}`: 1 for a response of so many digits; both counts are logged beside the score."""
    counts = [(sum(c.isdigit() for c in s.response), len(s.response)) for s in samples]
    return [{"score": float(found == wanted), "parts": {"digits": found, "others": size - found}} for found, size in counts]
