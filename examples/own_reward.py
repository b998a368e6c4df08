"""PPO with a reward of your own: register a rule, then let megappo train as its command does.

    scripts/quickstart.sh        # once: makes the model and the data that configs/quickstart.yaml names
    torchrun --nproc-per-node 2 examples/own_reward.py configs/quickstart.yaml run.name=own_reward \\
        'reward.parts=[{name: exact_match}, {name: close, weight: 0.5}]'

A rule is a function of one finished response. Every rank runs this file, so every rank knows the rule.
"""

from __future__ import annotations

import sys

from megappo.cli import main
from megappo.rewards.base import RewardInput
from megappo.rewards.rules import RULES


def close(sample: RewardInput) -> float:
    """Share of characters that are those of the answer, at the same place; 0 for an answer of another length."""
    response = sample.response.strip()
    if len(response) != len(sample.answer):
        return 0.0
    return sum(a == b for a, b in zip(response, sample.answer)) / len(sample.answer)


RULES["close"] = lambda: close

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
