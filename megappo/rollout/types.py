"""Interface of a generation engine: token ids in, token ids out; text is decoded for rewards and logs only. Ids and log-probs stay
numpy arrays up to the packed batch. `generation.py` runs an engine until a batch is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy
import torch.distributed as dist
from numpy.typing import NDArray

if TYPE_CHECKING:
    from megappo.data.prompts import Prompt

Ids = NDArray[numpy.int32]
Logprobs = NDArray[numpy.float32]


BATCH = 10**6
"""In an asynchronous run requests have numbers in the engine: that of their batch times this, plus that in the batch."""


class EnvironmentFault(RuntimeError):
    """An environment failed. The message names it, the sample and the turn; the trainer stops all ranks."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings; temperature 0 is greedy. ValueError for recorded ids with top_p but without top_k: there may be too
    many."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response and are part of it."""
    record_top_k_ids: bool = False
    """Record for each token the ids that top-k and top-p left."""
    record_experts: int = 0
    """Experts in a sparse layer of the model, whose choice is recorded for each token; 0: it is not."""

    def __post_init__(self) -> None:
        if self.record_top_k_ids and self.truncates and self.top_k < 1:
            raise ValueError(f"top_p {self.top_p} leaves any number of ids to record; set top_k too, or do not record them")

    @property
    def truncates(self) -> bool:
        """True if top-k or top-p cut a part of the vocabulary."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)

    @property
    def top_k_width(self) -> int:
        """Largest number of ids recorded per token; 0 if none are. `trainer/sampler_check.py` counts overflows."""
        # vLLM on a CPU keeps all ties with the k-th best logit, and bf16 logits tie: from 16 to 32 they are 1/8 apart, and near
        # the k-th best there are about k / 1.5 in an interval of 1, so that k / 12 are equal. The margin is several standard
        # deviations above that.
        return self.top_k + 16 + self.top_k // 8 if self.record_top_k_ids and self.truncates else 0


# Arrays have no truth value: the values below compare by identity, not by their fields.
@dataclass(frozen=True, eq=False)
class Request:
    """One response to draw."""

    number: int
    """Number of the sample in its batch."""
    prompt: Ids | Sequence[int]
    seed: int
    """Makes the response reproducible on any replica and in any batch."""
    group: int = -1
    """Equal for all requests of one prompt; -1 without one."""
    before: tuple[Segment, ...] = ()
    """Segments that earlier requests drew; the response continues after them."""
    max_tokens: int | None = None
    """Most tokens to draw; None takes it from the sampling settings."""
    goes_on: bool = False
    """If `max_tokens` cuts the response, a later request continues it."""
    source: Prompt | None = None
    """The prompt's record, for an environment; None if the ids come from none."""

    @property
    def tokens(self) -> Ids:
        return _joined([numpy.asarray(self.prompt, numpy.int32), *(segment.tokens for segment in self.before)])

    def limit(self, sampling: SamplingParams) -> int:
        return sampling.max_tokens if self.max_tokens is None else self.max_tokens

    def whole(self, response: Response) -> Response | None:
        """Return the response after `before`, or None if a later request continues it. Its `kept` covers the new tokens only."""
        if self.goes_on and response.finish == "length":
            return None
        return replace(response, segments=(*self.before, *response.segments))


@dataclass(frozen=True, eq=False)
class KeptIds:
    """Ids that each sampled token was drawn from, its own included, unordered; compact, as top-p mostly leaves few."""

    counts: Ids
    """int32 per sampled token."""
    ids: Ids
    """int32, concatenated over the tokens."""

    @classmethod
    def where(cls, table: Ids, kept: NDArray[numpy.bool_]) -> KeptIds:
        """Take the ids of a table [tokens, width] where `kept` [tokens, width] is true."""
        return cls(kept.sum(1, dtype=numpy.int32), table[kept])

    @classmethod
    def joined(cls, parts: Sequence[KeptIds]) -> KeptIds | None:
        """Return the ids of all parts' tokens; None for no part."""
        return cls(_joined([part.counts for part in parts]), _joined([part.ids for part in parts])) if parts else None

    def first(self, num_tokens: int) -> KeptIds:
        """Return the ids of the first `num_tokens` tokens."""
        counts = self.counts[:num_tokens]
        return KeptIds(counts, self.ids[: int(counts.sum())])


@dataclass(frozen=True, eq=False)
class Routes:
    """Experts that the sampler chose for some consecutive tokens of a sequence, prompt and response, the first of them `first`.
    Those before were in a cache, and the last token of a response is read by no model."""

    first: int
    experts: NDArray[Any]
    """[tokens, sparse layers x top_k] uint8, or int16 for more than 256 experts."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of a response, all sampled or all given (as a tool's output, which the policy only reads). version: of the weights."""

    tokens: Ids
    logprobs: Logprobs | None
    """float32, natural log, after temperature, top-k and top-p; None if the tokens were given."""
    version: int


@dataclass(frozen=True, eq=False)
class Context:
    """A sequence that compaction ended, with all that the policy read and sampled in it (CompactionRL, arXiv:2607.05378). prompt:
    ids before its segments, the last of which may be a summary. kept: as in `Response`."""

    prompt: Ids
    segments: tuple[Segment, ...]
    kept: KeptIds | None = None


@dataclass(frozen=True)
class Played:
    """Turns of a trajectory, without summaries."""

    turns: int
    seconds: tuple[float, ...]
    """One per call of the environment."""
    reached_limit: bool
    """The limit on turns ended the trajectory."""
    is_late: bool
    """An answer over the time limit ended the trajectory."""
    no_verdict: str = ""
    """Why the environment ended the trajectory without a score; "" if it did not."""


@dataclass(frozen=True, eq=False)
class Response:
    """Answer to a request: one segment, or more if tokens were given in between or the weights changed."""

    number: int
    segments: tuple[Segment, ...]
    finish: Literal["stop", "length"]
    """"stop": end-of-sequence token (then the last one) or stop string; "length": cut."""
    kept: KeptIds | None = None
    """Set if `SamplingParams.record_top_k_ids` is and top-k or top-p cut the vocabulary."""
    contexts: tuple[Context, ...] = ()
    """Earlier sequences of the trajectory, in order; it is scored by this one."""
    prompt: Ids | None = None
    """The compacted context that this sequence starts with; None if it starts with the request's prompt."""
    fault: str | None = None
    """The environment's failure, which ended the trajectory; raised on all ranks when the experience is collected."""
    played: Played | None = None
    """None without an environment."""
    routes: Routes | None = None
    """None if the engine records none."""
    verdicts: Mapping[str, Sequence[Any]] | None = None
    """Part of the reward -> JSON values (`trainer/scoring.py`) of what the rollout half has found; None if it was not asked."""

    @property
    def tokens(self) -> Ids:
        return _joined([segment.tokens for segment in self.segments])

    @property
    def logprobs(self) -> Logprobs:
        """Log-probs of all tokens, float32; 0 for given tokens."""
        zeros = numpy.zeros
        return _joined([zeros(len(s.tokens), numpy.float32) if s.logprobs is None else s.logprobs for s in self.segments])

    @property
    def sampled(self) -> NDArray[numpy.bool_]:
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


def joined(parts: Sequence[Any], dtype: type) -> NDArray:
    """Concatenate arrays of this type, of which there may be none."""
    return numpy.concatenate([numpy.empty(0, dtype), *parts])


def _joined(parts: list) -> NDArray:
    return parts[0] if len(parts) == 1 else numpy.concatenate(parts)


@dataclass(frozen=True)
class Replica:
    """The ranks that answer requests together, as one of them sees it: number `index` of `count` replicas."""

    index: int
    count: int
    group: dist.ProcessGroup | None
    """Host group of its ranks, of which the first takes requests for all; None for one rank."""
    max_running: int | None
    """Requests in work at once; None for any number."""

    @property
    def is_leader(self) -> bool:
        """True on the rank that takes requests for the replica."""
        return self.group is None or dist.get_rank(self.group) == 0

    def answers(self, number: int) -> bool:
        """True on the rank that answers for this request: all ranks of a replica draw the same tokens and answer in turn."""
        return self.group is None or number % self.group.size() == self.group.rank()


class RolloutEngine(Protocol):
    """Generator with the newest pushed weights. All ranks of a replica call `submit` and `poll` in the same order: a rank that
    submits one step late samples wrong tokens without an error. Replicas do not wait for each other there."""

    name: str

    @property
    def replica(self) -> Replica | None:
        """None on a rank without the engine; only `push_weights`, `sleep` and `close` are called there."""
        ...

    def meet(self, before: str) -> None:
        """Wait up to `run.timeouts.meeting_s` until all ranks of the engine are here. Called inside `serving`."""
        ...

    def serving(self) -> AbstractContextManager[None]:
        """Context of `submit` and `poll`; without an error, all requests are answered before it ends. Entering takes as long as a
        step.

        Inside, process state may not be the trainer's (random numbers drawn inside are drawn again outside), and collectives
        without a group run over the engine's ranks. RuntimeError if the engine has no weights or holds requests of a failed
        generation.
        """
        ...

    @property
    def num_unfinished(self) -> int:
        """Number of submitted requests without an answer; equal on all ranks of the replica."""
        ...

    @property
    def num_running(self) -> int:
        """Number of unfinished requests that count towards `Replica.max_running`: all that do not wait for an environment."""
        ...

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """Add requests to the running ones. ValueError for one that the engine cannot answer; then none is added."""
        ...

    def poll(self) -> list[Response]:
        """Run one step; return the newly finished responses that this rank answers for. Every response belongs to one rank."""
        ...

    def push_weights(self, version: int) -> dict[str, float]:
        """Copy the policy's weights into the engine; return metrics (seconds, bytes, verified). Collective over the world."""
        ...

    def sleep(self) -> None:
        """Release memory until the next push, before which nothing is generated. May do nothing. Collective."""
        ...

    def close(self) -> None:
        """Free the engine; the default process group stays. Collective."""
        ...
