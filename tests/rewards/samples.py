"""Short ways to write a finished response, and to score some with rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megappo.rewards.base import Part, RewardInput
from megappo.rewards.compose import WHOLE, Composition, Scored
from megappo.rewards.inline import InlinePart
from megappo.rewards.rules import make_part
from megappo.rewards.scorer import Scorer
from megappo.rewards.verdict import Verdict


def sample(response: str, answer: str = "", *, truncated: bool = False, num_tokens: int = 1, sample_id: str = "t#0") -> RewardInput:
    return RewardInput("q", response, answer, truncated, num_tokens, {}, sample_id)


def scorer_with(weights: Mapping[str, float], parts: Mapping[str, Part | Callable] | None = None, *penalties: Any) -> Scorer:
    """Scorer of one recipe. parts: those that are no built-in rules; a function stands for a rule."""
    given = parts or {}
    made = {name: given.get(name) or make_part(name) for name in weights}
    parts = {name: part if hasattr(part, "start") else InlinePart(name, part) for name, part in made.items()}
    return Scorer(parts, Composition({WHOLE: weights}, *penalties))


Verdicts = Mapping[str, Mapping[int, Verdict]]


def scores(scorer: Scorer, samples: Sequence[RewardInput], model_parts: Verdicts | None = None) -> Scored:
    """As the only rank scores them."""
    scorer.submit(samples)
    return scorer.composition.compose(scorer.finish(), model_parts)
