"""Score of a response: a weighted sum of rules minus penalties, with every part kept for the logs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megappo.rewards.base import RewardInput, RewardRule, UnusableAnswer
from megappo.rewards.own import OwnRule
from megappo.rewards.rules import make_rule

MISSING_EOS = "missing_eos_penalty"
LENGTH = "length_penalty"
LARGEST = torch.finfo(torch.float32).max  # scores are fp32 from here on; more would become infinite, and the batch's advantages NaN
_PART = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class RewardError(RuntimeError):
    """A rule failed. The message names the sample, the rule and the response's start; the trainer stops all ranks."""


@dataclass(frozen=True)
class Scores:
    """total: [B] fp32. parts: name -> [B] fp32; a rule's own value before its weight, or a penalty as it enters the total (<= 0).
    num_undecided: scores of 0 because a rule was undecided, as math_verify out of time.
    num_unusable: scores of 0 because a rule could not read the reference answer."""

    total: Tensor
    parts: dict[str, Tensor]
    num_undecided: int = 0
    num_unusable: int = 0


class Scorer:
    """score = sum of weight * rule - missing_eos_penalty * [cut] - length_penalty * max(0, num_tokens - length_penalty_start).

    A rule of weight 0 is logged without counting. Penalties of 0 have no part. A rule's own parts are logged as `rule.part`.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, float]],
        missing_eos_penalty: float = 0.0,
        length_penalty: float = 0.0,
        length_penalty_start: int = 0,
        own: Mapping[str, OwnRule] | None = None,
    ) -> None:
        """own: rules of the user by name; other names are of the table. ValueError: no parts, a name twice, an unknown name, a
        weight that is not finite."""
        if not parts:
            raise ValueError("reward.parts is empty: name at least one rule")
        names = [name for name, _ in parts]
        for name, weight in parts:
            if names.count(name) > 1:
                raise ValueError(f"reward.parts names {name} twice: give one part the sum of the weights")
            if not math.isfinite(weight):
                raise ValueError(f"reward.parts: the weight of {name} is {weight}, not a finite number")
        own = own or {}
        self._rules: dict[str, RewardRule | OwnRule] = {name: own[name] if name in own else make_rule(name) for name in names}
        self._weights = dict(parts)
        self._missing_eos_penalty = missing_eos_penalty
        self._length_penalty = length_penalty
        self._length_penalty_start = length_penalty_start

    def score(self, samples: Sequence[RewardInput]) -> Scores:
        """Score [B] finished responses. RewardError if a rule raises or returns anything but a finite number for one of them."""
        verdicts = {name: _apply(rule, name, samples) for name, rule in self._rules.items()}
        rules = {name: [verdict.score for verdict in found] for name, found in verdicts.items()}
        unscored = Counter(verdict.reason for found in verdicts.values() for verdict in found)
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
        for sample, value in zip(samples, total):
            if not abs(value) <= LARGEST:
                raise RewardError(f"the weighted rules add up to {value:g}, which fp32 does not hold; {_describe(sample)}")
        parts = {
            name: torch.tensor(values, dtype=torch.float32)
            for name, values in {**rules, **_inner_parts(verdicts), **penalties}.items()
        }
        return Scores(torch.tensor(total, dtype=torch.float32), parts, unscored["undecided"], unscored["unusable"])


@dataclass(frozen=True)
class _Verdict:
    """Result of a rule for a sample. reason: of a score of 0 that the rule did not give."""

    score: float
    parts: Mapping[str, float]
    reason: Literal["undecided", "unusable"] | None = None


_UNDECIDED, _UNUSABLE = _Verdict(0.0, {}, "undecided"), _Verdict(0.0, {}, "unusable")


def _apply(rule: RewardRule | OwnRule, name: str, samples: Sequence[RewardInput]) -> list[_Verdict]:
    if isinstance(rule, OwnRule) and rule.batch:
        return _apply_to_batch(rule, name, samples)
    return [_apply_to_one(rule, name, sample) for sample in samples]


def _apply_to_one(rule: RewardRule | OwnRule, name: str, sample: RewardInput) -> _Verdict:
    try:
        value = rule.call(sample) if isinstance(rule, OwnRule) else rule(sample)
    except UnusableAnswer:  # told before the run started (`prepare/answers.py`)
        return _UNUSABLE
    except (Exception, SystemExit) as error:  # any fault of a rule: named here, then it stops the run
        raise RewardError(f"{_raised(rule, name, error)}; {_describe(sample)}") from error
    return _verdict(value, name, sample)


def _apply_to_batch(rule: OwnRule, name: str, samples: Sequence[RewardInput]) -> list[_Verdict]:
    if not samples:  # of a rank without a share
        return []
    try:
        values = _plain(rule.call(list(samples)))
    except (Exception, SystemExit) as error:
        raise RewardError(f"{_raised(rule, name, error)}; {len(samples)} samples, the first: {_describe(samples[0])}") from error
    if not isinstance(values, (list, tuple)) or len(values) != len(samples):
        got = f"{len(values)} results" if isinstance(values, (list, tuple)) else f"{type(values).__name__}, no list,"
        raise RewardError(f"reward rule {name} returned {got} for {len(samples)} samples, the first: {_describe(samples[0])}")
    return [_verdict(value, name, sample) for value, sample in zip(values, samples)]


def _verdict(value: Any, name: str, sample: RewardInput) -> _Verdict:
    value = _plain(value)
    if value is None:
        return _UNDECIDED
    if not isinstance(value, Mapping):
        return _Verdict(_number(value, f"reward rule {name} returned", sample), {})
    if "per_token" in value:
        raise RewardError(f"reward rule {name} returned per_token: rewards of tokens are not supported, return one score")
    parts = value.get("parts", {})
    if "score" not in value or set(value) - {"score", "parts"} or not isinstance(parts, Mapping):
        raise RewardError(f"reward rule {name} returned {value!r}, not score (a number) and parts (a mapping); {_describe(sample)}")
    if odd := [part for part in parts if not isinstance(part, str) or not _PART.fullmatch(part)]:
        raise RewardError(f"reward rule {name} named a part {odd[0]!r}: use letters, digits and . _ -; {_describe(sample)}")
    score = _number(value["score"], f"reward rule {name} returned the score", sample)
    named = {part: _number(_plain(number), f"reward rule {name} returned for {part}", sample) for part, number in parts.items()}
    return _Verdict(score, named)


def _plain(value: Any) -> Any:
    """Python's value of a tensor or a NumPy array or scalar."""
    return value.tolist() if hasattr(value, "tolist") else value


def _number(value: Any, what: str, sample: RewardInput) -> float:
    if not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise RewardError(f"{what} {value!r}, not a finite number; {_describe(sample)}")
    return float(value)


def _inner_parts(verdicts: Mapping[str, Sequence[_Verdict]]) -> dict[str, list[float]]:
    """Parts inside the rules, as `rule.part`; 0 for a sample without that part."""
    found: dict[str, list[float]] = {}
    for name, verdicts_of_rule in verdicts.items():
        for part in sorted({part for verdict in verdicts_of_rule for part in verdict.parts}):
            found[f"{name}.{part}"] = [verdict.parts.get(part, 0.0) for verdict in verdicts_of_rule]
    return found


def _raised(rule: RewardRule | OwnRule, name: str, error: BaseException) -> str:
    place = rule.place(error) if isinstance(rule, OwnRule) else ""
    return f"reward rule {name} raised {type(error).__name__}: {error}{place}"


def _describe(sample: RewardInput) -> str:
    return f"sample {sample.sample_id}, response {sample.response[:200]!r}"
