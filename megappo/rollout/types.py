"""Interface of a generation engine. Token ids in, token ids out; text is decoded for rewards and logs only.

Ids and log-probs are numpy arrays from the engine to the packed batch. `generation.py` runs an engine until a batch is answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy
import torch.distributed as dist
from numpy.typing import NDArray

if TYPE_CHECKING:
    from megappo.data.prompts import Prompt

Ids = NDArray[numpy.int32]
Logprobs = NDArray[numpy.float32]


class EnvironmentFault(RuntimeError):
    """An environment failed. The message names it, the sample and the turn; the trainer stops all ranks."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings. temperature 0 is greedy. stop: strings. stop_token_ids: ids that end a response and are part of it.

    record_top_k_ids: record the ids that top-k and top-p left for each token. ValueError for top_p without top_k, which leaves up
    to the whole vocabulary.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    record_top_k_ids: bool = False

    def __post_init__(self) -> None:
        if self.record_top_k_ids and self.truncates and self.top_k < 1:
            raise ValueError(f"top_p {self.top_p} leaves any number of ids to record; set top_k too, or do not record them")

    @property
    def truncates(self) -> bool:
        """True if a part of the vocabulary cannot be sampled."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)

    @property
    def top_k_width(self) -> int:
        """Maximal number of ids recorded for a token; 0 if none are. `trainer/sampler_check.py` counts overflows."""
        # vLLM on a CPU keeps all ties with the k-th best logit, and bf16 logits tie: from 16 to 32 they are 1/8 apart, and near
        # the k-th best there are about k / 1.5 in an interval of 1, so that k / 12 are equal. The margin is several standard
        # deviations above that.
        return self.top_k + 16 + self.top_k // 8 if self.record_top_k_ids and self.truncates else 0


# Arrays have no truth value: the values below compare by identity, not by their fields.
@dataclass(frozen=True, eq=False)
class Request:
    """One response to draw. number: of the sample in its batch. prompt: ids, int32 if an array. seed: makes the response
    reproducible on any replica and in any batch. group: the same for all requests of one prompt; -1 of a request without one.

    before: segments of the response that earlier requests drew; it goes on after them. max_tokens: most tokens to draw, None: those
    of the sampling settings. goes_on: a response that they cut is drawn further by a later request. source: of the ids, for an
    environment; None if they are of no record.
    """

    number: int
    prompt: Ids | Sequence[int]
    seed: int
    group: int = -1
    before: tuple[Segment, ...] = ()
    max_tokens: int | None = None
    goes_on: bool = False
    source: Prompt | None = None

    @property
    def tokens(self) -> Ids:
        """Ids that the next token follows, int32: the prompt and what there is of the response."""
        return _joined([numpy.asarray(self.prompt, numpy.int32), *(segment.tokens for segment in self.before)])

    def limit(self, sampling: SamplingParams) -> int:
        """Most tokens to draw."""
        return sampling.max_tokens if self.max_tokens is None else self.max_tokens

    def whole(self, response: Response) -> Response | None:
        """The response with what earlier requests drew; None if a later request goes on with it. `kept` is of the answer alone."""
        if self.goes_on and response.finish == "length":
            return None
        return replace(response, segments=(*self.before, *response.segments))


@dataclass(frozen=True, eq=False)
class KeptIds:
    """Ids that each sampled token of a response was drawn from, its own included, in no particular order.

    counts: int32 per sampled token. ids: int32, concatenated over the tokens. Compact, because they travel: with top-p most tokens
    are drawn from a few ids.
    """

    counts: Ids
    ids: Ids

    @classmethod
    def where(cls, table: Ids, kept: NDArray[numpy.bool_]) -> KeptIds:
        """Ids of a table [tokens, width] at the places [tokens, width] that are kept."""
        return cls(kept.sum(1, dtype=numpy.int32), table[kept])

    def first(self, num_tokens: int) -> KeptIds:
        """Ids of the first `num_tokens` tokens."""
        counts = self.counts[:num_tokens]
        return KeptIds(counts, self.ids[: int(counts.sum())])


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of a response, all sampled or all given (the output of a tool, which the policy only reads).

    tokens: int32. logprobs: float32, natural log, under the sampled distribution (after temperature, top-p, top-k); None if the
    tokens were given. version: of the engine's weights at the time.
    """

    tokens: Ids
    logprobs: Logprobs | None
    version: int


@dataclass(frozen=True, eq=False)
class Context:
    """A sequence that a trajectory has left behind, as its context was compacted (CompactionRL, arXiv:2607.05378): all of what the
    policy read and sampled, a summary at its end included. prompt: ids before its segments. kept: as of a response."""

    prompt: Ids
    segments: tuple[Segment, ...]
    kept: KeptIds | None = None


@dataclass(frozen=True)
class Played:
    """Turns of a trajectory. turns: of the policy, summaries not counted. seconds: of each call of the environment.
    reached_limit: the most turns that a trajectory may have ended it. is_late: an answer that took too long did."""

    turns: int
    seconds: tuple[float, ...]
    reached_limit: bool
    is_late: bool


@dataclass(frozen=True, eq=False)
class Response:
    """Answer to a request: one segment, or more if tokens were given in between or the weights changed.

    number: of the request. finish: "stop" (end of sequence, which is then the last token, or stop string) or "length" (cut). kept:
    ids that the sampled tokens were drawn from, if `SamplingParams.record_top_k_ids` is set and top-k or top-p cut the vocabulary.

    contexts: sequences of the same trajectory before this one, in their order; the trajectory is scored by this one. prompt: ids
    that this one begins with, the compacted context; None: those of the request. fault: of the environment, which ended the
    trajectory; it is raised on all ranks where the experience is collected. played: None without an environment.
    """

    number: int
    segments: tuple[Segment, ...]
    finish: Literal["stop", "length"]
    kept: KeptIds | None = None
    contexts: tuple[Context, ...] = ()
    prompt: Ids | None = None
    fault: str | None = None
    played: Played | None = None

    @property
    def tokens(self) -> Ids:
        """All tokens, int32."""
        return _joined([segment.tokens for segment in self.segments])

    @property
    def logprobs(self) -> Logprobs:
        """Log-probs of all tokens, float32; 0 for given ones."""
        zeros = numpy.zeros
        return _joined([zeros(len(s.tokens), numpy.float32) if s.logprobs is None else s.logprobs for s in self.segments])

    @property
    def sampled(self) -> NDArray[numpy.bool_]:
        """True for every token that was sampled."""
        return _joined([numpy.full(len(segment.tokens), segment.logprobs is not None) for segment in self.segments])

    @property
    def num_sampled(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments if segment.logprobs is not None)

    @property
    def oldest_version(self) -> int:
        return min(segment.version for segment in self.segments)

    @property
    def newest_version(self) -> int:
        return max(segment.version for segment in self.segments)


def _joined(parts: list) -> NDArray:
    return parts[0] if len(parts) == 1 else numpy.concatenate(parts)


@dataclass(frozen=True)
class Replica:
    """The ranks that answer requests together, as one of them sees it.

    index: number of this rank's replica, of `count`. group: its ranks, on the host, the first of which takes requests for all; None
    if the replica is one rank. max_running: requests that it works on at once; None for any number.
    """

    index: int
    count: int
    group: dist.ProcessGroup | None
    max_running: int | None

    @property
    def is_leader(self) -> bool:
        """True on the rank that takes requests for the replica."""
        return self.group is None or dist.get_rank(self.group) == 0

    def answers(self, number: int) -> bool:
        """True on the rank that answers for this request: the ranks of a replica, which all draw the same, answer in turn."""
        return self.group is None or number % self.group.size() == self.group.rank()


class RolloutEngine(Protocol):
    """Generator with the newest pushed weights.

    The ranks of a replica make the same calls of `submit` and `poll` in the same order: one that submits a step later than the
    others samples wrong tokens without an error. Replicas do not wait for each other there.
    """

    name: str

    @property
    def replica(self) -> Replica | None:
        """None on a rank that the engine does not live on; there only `push_weights`, `sleep` and `close` are called."""
        ...

    def meet(self, before: str) -> None:
        """Wait until all ranks of the engine are here, for up to `run.timeouts.meeting_s`. Called inside `serving`."""
        ...

    def serving(self) -> AbstractContextManager[None]:
        """Context of `submit` and `poll`; all requests are answered before it is left, unless by an error.

        Entering takes as long as a step. Inside, the process may be in another state than the trainer's (random numbers drawn there
        are drawn again outside), and collectives without a group are of the engine's ranks. RuntimeError if the engine cannot
        answer: no weights, or requests of a failed generation.
        """
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and not answered; equal on all ranks of the replica."""
        ...

    @property
    def num_running(self) -> int:
        """Those of them that take a place of `Replica.max_running`: all that do not wait for an environment."""
        ...

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """Add requests to those that run. ValueError for one that the engine cannot answer; then none is added."""
        ...

    def poll(self) -> list[Response]:
        """Run one step; returns what finished since and this rank answers for: every response belongs to one rank."""
        ...

    def push_weights(self, version: int) -> dict[str, float]:
        """Copy the policy's current weights into the engine; returns metrics (seconds, bytes, verified). Collective over the
        world."""
        ...

    def sleep(self) -> None:
        """Release memory until the next push, before which nothing is generated. May do nothing. Collective."""
        ...

    def close(self) -> None:
        """Free the engine; the default process group stays. Collective."""
        ...
