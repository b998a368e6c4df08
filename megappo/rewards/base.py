"""Interface of the parts of a reward: their input, their result, and how they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class RewardInput:
    """One finished response.

    response: its text before the end-of-sequence token and the first of `rollout.stop`. record: the data record of the prompt.
    truncated: cut by the length limit. num_tokens: sampled tokens. full_response: the text with the stop string and special tokens.
    tokens: the sampled ids. turns: text of each turn of the policy, as `response` is; of one turn that alone. With several turns
    response and full_response are of all of them, and of the observations between.
    """

    prompt: str
    response: str
    answer: str
    truncated: bool
    num_tokens: int
    record: Mapping[str, Any]
    sample_id: str
    full_response: str = ""
    tokens: tuple[int, ...] = ()
    turns: tuple[str, ...] = ()


class UnusableAnswer(ValueError):
    """A part cannot read the reference answer of a sample: a fault of the data. The sample scores 0 and is counted."""


class RewardError(RuntimeError):
    """A part failed. The message names the part, the sample and the response's start; the trainer stops all ranks."""


Result = float | Mapping[str, Any] | None
"""A finite number, or {"score": number, "parts": {name: number}, "per_token": num_tokens numbers}, or None for undecided: scored 0
and counted. NumPy's and torch's numbers and arrays will do."""


class Part(Protocol):
    """One part of a reward on this rank.

    A future's `UnusableAnswer` scores 0 and is counted. After any other exception all ranks stop; a `RewardError` tells itself
    which part and sample failed, of other exceptions the scorer says it.

    streams: values come from other threads or processes, and do not depend on which samples were started together or before: then
    samples are started while others are generated. Futures of samples that still wait can be cancelled.
    """

    streams: bool

    def start(self, samples: Sequence[RewardInput]) -> Sequence[Future[Any]]:
        """One future of a `Result` (or a `workers.pool.Timed` one) per sample, in order; may be done already. Called again as
        samples finish."""
        ...

    def close(self) -> None:
        """End its workers and connections, also those with work in hand. May be called twice."""
        ...


@runtime_checkable
class RetryingPart(Part, Protocol):
    """A part that asks again what failed. num_retries: requests sent again so far."""

    num_retries: int


@dataclass(frozen=True)
class PreparedPart:
    """A part that was loaded and checked before a model was built.

    make: builds it on a rank; None for a part that all ranks compute together. requires: `answer`, and fields that every record
    must have. sha256: of its code; None if it has none. ask: tries on a
    rank, before a model is built and for up to so many seconds, if the part can work; RewardError if not. None: nothing to try.
    """

    make: Callable[[], Part] | None
    requires: tuple[str, ...] = ()
    sha256: str | None = None
    ask: Callable[[float], None] | None = None


def describe(sample: RewardInput) -> str:
    """Name a sample in a message."""
    return f"sample {sample.sample_id}, response {sample.response[:200]!r}"
