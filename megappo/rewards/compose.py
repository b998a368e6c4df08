"""Score of a response: a weighted sum of rules minus penalties, with every part kept for the logs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.rewards.base import RewardInput, RewardRule
from megappo.rewards.rules import make_rule
from megappo.rewards.symbolic import MathVerify

MISSING_EOS = "missing_eos_penalty"
LENGTH = "length_penalty"


class RewardError(RuntimeError):
    """A rule failed. The message names the sample, the rule and the response's start; the trainer stops all ranks."""


@dataclass(frozen=True)
class Scores:
    """total: [B] fp32. parts: name -> [B] fp32; a rule's own value before its weight, or a penalty as it enters the total (<= 0).
    num_undecided: samples that math_verify scored 0 because it ran out of time."""

    total: Tensor
    parts: dict[str, Tensor]
    num_undecided: int = 0


class Scorer:
    """score = sum of weight * rule - missing_eos_penalty * [cut] - length_penalty * max(0, num_tokens - length_penalty_start).

    A rule of weight 0 is logged without counting. Penalties of 0 have no part.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, float]],
        missing_eos_penalty: float = 0.0,
        length_penalty: float = 0.0,
        length_penalty_start: int = 0,
    ) -> None:
        """ValueError: no parts, a name twice, an unknown name, a weight that is not finite."""
        if not parts:
            raise ValueError("reward.parts is empty: name at least one rule")
        names = [name for name, _ in parts]
        for name, weight in parts:
            if names.count(name) > 1:
                raise ValueError(f"reward.parts names {name} twice: give one part the sum of the weights")
            if not math.isfinite(weight):
                raise ValueError(f"reward.parts: the weight of {name} is {weight}, not a finite number")
        self._rules: dict[str, RewardRule] = {name: make_rule(name) for name in names}
        self._weights = dict(parts)
        self._missing_eos_penalty = missing_eos_penalty
        self._length_penalty = length_penalty
        self._length_penalty_start = length_penalty_start

    def score(self, samples: Sequence[RewardInput]) -> Scores:
        """Score [B] finished responses. RewardError if a rule raises or returns no finite number."""
        undecided = self._undecided()  # the rules' counters run on over all steps
        rules = {name: [_apply(rule, name, sample) for sample in samples] for name, rule in self._rules.items()}
        penalties: dict[str, list[float]] = {}
        if self._missing_eos_penalty:
            penalties[MISSING_EOS] = [-self._missing_eos_penalty if s.truncated else 0.0 for s in samples]
        if self._length_penalty:
            excess = [max(0, s.num_tokens - self._length_penalty_start) for s in samples]
            penalties[LENGTH] = [-self._length_penalty * n for n in excess]
        total = [
            sum(self._weights[name] * values[i] for name, values in rules.items()) + sum(values[i] for values in penalties.values())
            for i in range(len(samples))
        ]
        parts = {name: torch.tensor(values, dtype=torch.float32) for name, values in {**rules, **penalties}.items()}
        return Scores(torch.tensor(total, dtype=torch.float32), parts, self._undecided() - undecided)

    def _undecided(self) -> int:
        return sum(rule.undecided for rule in self._rules.values() if isinstance(rule, MathVerify))


def _apply(rule: RewardRule, name: str, sample: RewardInput) -> float:
    try:
        value = rule(sample)
    except Exception as error:  # any fault of a rule: named here, then it stops the run
        raise RewardError(f"reward rule {name} raised {type(error).__name__}: {error}; {_describe(sample)}") from error
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RewardError(f"reward rule {name} returned {value!r}, not a finite number; {_describe(sample)}")
    return float(value)


def _describe(sample: RewardInput) -> str:
    return f"sample {sample.sample_id}, response {sample.response[:200]!r}"
