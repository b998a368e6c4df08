"""GSM8K's answers: the final line of a solution is `#### 72` (Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems").
A number is an optional sign (- + or U+2212), an optional $ before or after it, digits with correct thousands commas or none, an
optional decimal part. Numbers are compared as exact decimals: 5, 5.00 and 05 are equal, and so are 1,000 and 1000. Text after it
(a full stop, %, a unit) is ignored; a number that continues as something else (3/4, 2^5, 1,23, 5e3, 36+36=72) does not count."""

from __future__ import annotations

import re
from decimal import Decimal

from megappo.rewards.base import RewardInput, UnusableAnswer

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|(?<!\.)\.[0-9]+"
_NUMBER = rf"(?P<sign>[-+\u2212]?)[ ]?\$?(?P<sign_after>[-\u2212]?)[ ]?(?P<digits>{_DIGITS})"
# May not follow: more digits, a decimal or grouped part that the number cannot take in, an operator with its operand, an exponent.
_END = r"(?![0-9]|[.,][0-9]|[ ]?[-+/^*=]{1,2}[ ]?[$]?[0-9(]|[eE][-+]?[0-9])"
_MARKED = re.compile(rf"####[^\S\n]*{_NUMBER}{_END}")
# In running text a minus is a sign only without an operand before it; sums and lists stay apart: the last number of "2+3" is 3.
_ANYWHERE = re.compile(
    rf"(?<![0-9])(?<![0-9][/^])(?:(?<![\w)])(?P<sign>[-+\u2212]))?\$?(?P<sign_after>-?)(?P<digits>{_DIGITS})(?![0-9]|\.[0-9]|[/^][0-9])"
)
_WHOLE = re.compile(rf"\s*{_NUMBER}\s*\.?\s*")


def gsm8k_strict(sample: RewardInput) -> float:
    """1 if the number after the last `#### ` with a number on its line equals the answer, else 0."""
    return float(marked_number(sample.response) == gold_number(sample.answer))


def gsm8k_flexible(sample: RewardInput) -> float:
    """1 if the last number anywhere in the response equals the answer, whatever the format (verl's `method="flexible"`), else 0."""
    return float(last_number(sample.response) == gold_number(sample.answer))


def gsm8k_format(sample: RewardInput) -> float:
    """1 if the response has `#### ` and a number, right or wrong, else 0."""
    return float(_MARKED.search(sample.response) is not None)


def marked_number(response: str) -> Decimal | None:
    """Number after the last `#### ` that has one: the final answer to `gsm8k_strict`."""
    return _last(_MARKED, response)


def last_number(response: str) -> Decimal | None:
    """Last number anywhere: the final answer to `gsm8k_flexible`."""
    return _last(_ANYWHERE, response)


def gold_number(answer: str) -> Decimal:
    """Number of a reference answer: the text after the last `####`, or all of it. Raises UnusableAnswer if that is no number."""
    match = _WHOLE.fullmatch(answer.rsplit("####", 1)[-1])
    if match is None:
        raise UnusableAnswer(f"the reference answer {answer[-80:]!r} is not a number and does not end with `#### number`")
    return _value(match)


def _last(pattern: re.Pattern[str], text: str) -> Decimal | None:
    matches = list(pattern.finditer(text))
    return _value(matches[-1]) if matches else None


def _value(match: re.Match[str]) -> Decimal:
    value = Decimal(match["digits"].replace(",", ""))  # exact: 0.1 + 0.2 compares as 0.3
    negative = match["sign"] in ("-", "\u2212") or match["sign_after"] in ("-", "\u2212")
    return -value if negative else value
