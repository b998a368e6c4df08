"""An environment of your own: a wrong number is answered with its direction, `+` for higher or `-` for lower, and the policy tries
again.

    scripts/quickstart.sh        # once: makes the model and the data that configs/quickstart.yaml names
    megappo train configs/quickstart.yaml run.name=second_guess rollout.max_response_tokens=20 \\
        rollout.environment.path=examples/second_guess.py rollout.environment.function=hint rollout.environment.max_turns=3 \\
        'reward.parts=[{path: examples/second_guess.py, function: last_guess}]'

configs/recipes/turn_ppo.yaml uses it on GSM8K. docs/environments.md has everything that an environment sees and may return.
"""

from __future__ import annotations

from megappo.rewards.base import RewardInput
from megappo.rollout.turn import TextTurn


def hint(turn: TextTurn, higher: str = "+", lower: str = "-") -> str | None:
    """The direction of the result from this guess, or None: the guess is right, and the trajectory ends."""
    guess, result = number(turn.response), number(turn.answer)
    assert result is not None, f"the answer {turn.answer!r} is no number"
    if guess == result:
        return None
    return higher if guess is None or guess < result else lower


def last_guess(sample: RewardInput, discount: float = 0.5) -> float:
    """1 for a result that is right at once, half as much for each further turn, and 0 if the last guess is wrong."""
    is_right = bool(sample.turns) and number(sample.turns[-1]) == number(sample.answer)
    return is_right * discount ** max(0, len(sample.turns) - 1)


def number(text: str) -> float | None:
    """The number that a text is, or that stands behind its last ####; None if it is none."""
    try:
        return float(text.rpartition("####")[2].strip().lstrip("$").replace(",", ""))
    except ValueError:
        return None
