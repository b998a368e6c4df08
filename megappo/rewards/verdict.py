"""Result of a part for one sample, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megappo.rewards.base import NoVerdict, RewardError, RewardInput, describe
from megappo.runtime.user_code import NAME, UNDECIDED

# Of fp32, as scores are from here on; more would become infinite, and the batch's advantages NaN.
LARGEST = (2 - 2.0**-23) * 2.0**127
PER_TOKEN = "per_token"
_KEYS = {"score", "parts", PER_TOKEN}


@dataclass(frozen=True)
class Verdict:
    """Result of a part for a sample."""

    score: float
    """NaN without a verdict."""
    parts: Mapping[str, float]
    """Numbers inside it; the sum of per_token has that name."""
    per_token: tuple[float, ...] | None = None
    """[num_tokens] rewards of the sampled tokens; None if the part has none."""
    reason: str | None = None
    """Why there is no verdict; None if there is one."""
    seconds: float | None = None
    """Time that it took; None if unknown."""
    num_tokens: int | None = None
    """Tokens that a reward model read for it; None for other parts."""


def no_verdict(reason: str, seconds: float | None = None) -> Verdict:
    """Return the result of a part that could not judge a sample."""
    return Verdict(math.nan, {}, reason=reason, seconds=seconds)


def verdict_of(result: Any, name: str, sample: RewardInput, seconds: float | None = None) -> Verdict:
    """Check the result of part `name`. Raises RewardError, naming the sample, for anything but a `rewards.base.Result`."""
    result = plain(result)
    if result is None or isinstance(result, NoVerdict):  # a function of many samples cannot raise it for one
        return no_verdict(UNDECIDED if result is None else result.reason, seconds)
    if not isinstance(result, Mapping):
        return Verdict(_number(result, f"reward rule {name} returned", sample), {}, seconds=seconds)
    parts = result.get("parts", {})
    if "score" not in result or set(result) - _KEYS or not isinstance(parts, Mapping):
        wanted = "score (a number), parts (a mapping) and per_token (a list)"
        raise RewardError(f"reward rule {name} returned {_short(result)}, not {wanted}; {describe(sample)}")
    if odd := [part for part in parts if not isinstance(part, str) or not NAME.fullmatch(part) or part == PER_TOKEN]:
        fix = "that is the name of the tokens' sum" if odd[0] == PER_TOKEN else "use letters, digits and . _ -"
        raise RewardError(f"reward rule {name} named a part {odd[0]!r}: {fix}; {describe(sample)}")
    score = _number(plain(result["score"]), f"reward rule {name} returned the score", sample)
    named = {part: _number(plain(number), f"reward rule {name} returned for {part}", sample) for part, number in parts.items()}
    per_token = _per_token(result, name, sample)
    if per_token is not None:
        named[PER_TOKEN] = _number(sum(per_token), f"the per_token of reward rule {name} add up to", sample)
    return Verdict(score, named, per_token, seconds=seconds)


def plain(value: Any) -> Any:
    """Convert a tensor or a NumPy array or scalar to Python's value."""
    return value.tolist() if hasattr(value, "tolist") else value


def _per_token(result: Mapping[str, Any], name: str, sample: RewardInput) -> tuple[float, ...] | None:
    values = plain(result.get(PER_TOKEN))
    if values is None:
        return None
    if not isinstance(values, (list, tuple)):
        raise RewardError(f"reward rule {name} returned per_token {_short(values)}, not a list of numbers; {describe(sample)}")
    if len(values) != sample.num_tokens:
        counts = f"{len(values)} rewards for {sample.num_tokens} sampled tokens"
        raise RewardError(f"reward rule {name} returned per_token with {counts} (sample.tokens); {describe(sample)}")
    what = f"reward rule {name} returned in per_token, at token"
    return tuple(_number(plain(value), f"{what} {at},", sample) for at, value in enumerate(values))


def _number(value: Any, what: str, sample: RewardInput) -> float:
    if not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise RewardError(f"{what} {_short(value)}, not a finite number; {describe(sample)}")
    return float(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
