"""Interface of the parts of a reward: their input, their result, and how they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from megappo.runtime.ending import Unavailable
from megappo.runtime.user_code import NoVerdict


@dataclass(frozen=True)
class RewardInput:
    """One finished response."""

    prompt: str
    response: str
    """Text before the end-of-sequence token and the first of `rollout.stop`; includes the observations between several turns."""
    answer: str
    truncated: bool
    """True if the length limit cut the response."""
    num_tokens: int
    """Sampled tokens."""
    record: Mapping[str, Any]
    """Data record of the prompt."""
    sample_id: str
    full_response: str = ""
    """`response` with the stop string and special tokens."""
    tokens: tuple[int, ...] = ()
    """Sampled ids."""
    turns: tuple[str, ...] = ()
    """Text of each turn of the policy, cut as `response` is; one entry if there is one turn."""


UNUSABLE, UNREACHABLE = "unusable", "unreachable"
"""Reasons of parts alone: the reference answer cannot be read; the server was down for the whole retry budget."""


class UnusableAnswer(NoVerdict, ValueError):
    """A part cannot read the reference answer of a sample, a fault of the data. The text says what is wrong with it."""

    def __init__(self, text: str = "") -> None:
        super().__init__(UNUSABLE)
        self.args = (text,)


class RewardError(RuntimeError):
    """A part failed. The message names the part, the sample and the response's start; the trainer stops all ranks."""


class TooFewVerdicts(RewardError, Unavailable):
    """More samples of a step than `reward.max_without_verdict` allows have no score. Raised on all ranks, which save."""


Result = float | Mapping[str, Any] | None
"""A finite number, or {"score": number, "parts": {name: number}, "per_token": num_tokens numbers}, or None for no verdict
(undecided), or a `NoVerdict`. Numbers and arrays of NumPy and torch are accepted."""


class Part(Protocol):
    """One part of a reward on this rank.
    `NoVerdict` in a future leaves the sample without a score; any other exception stops all ranks. A `RewardError` names the part
    and the sample itself, for others the scorer adds them."""

    streams: bool
    """True if values are computed in other threads or processes and do not depend on which samples start together or before.
    Samples then start while others are generated, and futures of waiting samples can be cancelled."""

    def start(self, samples: Sequence[RewardInput]) -> Sequence[Future[Any]]:
        """Start samples, in any number of calls: one future of a `Result` (or a `worker_pool.Timed` one) each, in order."""
        ...

    def close(self) -> None:
        """End its workers and connections, even if they are busy. May be called twice."""
        ...


@runtime_checkable
class RetryingPart(Part, Protocol):
    """A part that sends failed requests again."""

    num_retries: int
    """Requests sent again so far."""


@dataclass(frozen=True)
class PreparedPart:
    """A part that was loaded and checked before a model was built."""

    make: Callable[[], Part] | None
    """Builds the part on a rank; None for a part that all ranks compute together."""
    requires: tuple[str, ...] = ()
    """`answer`, and fields that every record must have."""
    sha256: str | None = None
    """SHA-256 of its code; None if it has none."""
    reads_answer: bool = False
    """True for a rule that compares with the reference answer, and for code whose text reads one."""
    ask: Callable[[float], None] | None = None
    """Tries on a rank, for up to so many seconds and before a model is built, if the part can work; raises RewardError if not."""


def describe(sample: RewardInput) -> str:
    return f"sample {sample.sample_id}, response {sample.response[:200]!r}"
