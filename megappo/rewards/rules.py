"""Table of the reward rules, and the rules that need no arithmetic. Weights and penalties are in `compose.py`.
A configuration names rules of this table; a data record never does, so that data cannot choose its own scoring."""

from __future__ import annotations

import difflib
import hashlib
import sys
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path

from megappo.rewards.base import Part, RewardInput
from megappo.rewards.gsm8k import gsm8k_flexible, gsm8k_format, gsm8k_strict
from megappo.rewards.inline import InlinePart
from megappo.rewards.pool import PoolPart
from megappo.rewards.symbolic import MathVerify
from megappo.runtime.worker_pool import Worker


def exact_match(sample: RewardInput) -> float:
    """1 if the response equals the answer, after Unicode NFKC and with runs of white space as one space; case-sensitive."""
    return float(normalised(sample.response) == normalised(sample.answer))


def has_eos(sample: RewardInput) -> float:
    """1 if the response ended by itself, 0 if the length limit cut it."""
    return float(not sample.truncated)


def normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())


RewardRule = Callable[[RewardInput], float | None]

# Name -> factory. Most rules are plain functions; math_verify holds a worker process, so every scorer makes its own.
RULES: Mapping[str, Callable[[], RewardRule]] = {
    "exact_match": lambda: exact_match,
    "gsm8k_strict": lambda: gsm8k_strict,
    "gsm8k_flexible": lambda: gsm8k_flexible,
    "gsm8k_format": lambda: gsm8k_format,
    "math_verify": MathVerify,
    "has_eos": lambda: has_eos,
}

# Rules that work in a process of their own: a rank can have several of them, and they work while it generates.
POOLED: Mapping[str, Callable[[], Worker]] = {"math_verify": MathVerify}

READS_ANSWER = ("exact_match", "gsm8k_strict", "gsm8k_flexible", "math_verify")
READS_NUMBER = ("gsm8k_strict", "gsm8k_flexible")
"""Rules that need a number as reference answer (`gsm8k.gold_number`)."""


def make_rule(name: str) -> RewardRule:
    """Make the rule of this name. Raises ValueError with the nearest name and the whole list."""
    if name in RULES:
        return RULES[name]()
    nearest = difflib.get_close_matches(name, RULES, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ValueError(f"reward.parts: there is no rule {name!r}; {hint}Rules: {', '.join(RULES)}")


def make_part(name: str, workers: int = 0) -> Part:
    """Make a part of the rule of this name, in the main thread or a pool of at least one worker. Raises ValueError as
    `make_rule`."""
    if name in POOLED:
        return PoolPart(name, POOLED[name], max(1, workers))
    rule = make_rule(name)
    return InlinePart(name, rule, close=getattr(rule, "close", None))


def hash_of_code(name: str) -> str | None:
    """SHA-256 of the source files that define a rule; None if there is no such file. Raises ValueError as `make_rule`."""
    rule = make_rule(name)
    file = sys.modules[rule.__module__].__file__  # of the function, or of the object's class
    if file is None or not Path(file).is_file():
        return None
    files = [Path(file), *(Path(file).with_name(other) for other in getattr(rule, "also", ()))]
    return hashlib.sha256(b"".join(one.read_bytes() for one in files)).hexdigest()
