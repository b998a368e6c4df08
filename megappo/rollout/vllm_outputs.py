"""vLLM's outputs as arrays. `SampledRows` replaces vLLM's `LogprobsProcessor` for each request: it copies the sampler's rows in 3
us per token, where vLLM's lists of Python numbers take 13 us, or 54 us with `top_k: 50` recorded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy

from megappo.rollout.types import Ids, KeptIds, Logprobs, Request, Response, Routes, SamplingParams, Segment

Detokenize = Callable[[Sequence[int]], str]
_FIRST_ROWS = 64  # doubled when they are full


class SampledRows:
    """The sampler's rows of one request: per token the sampled id and the `best` most likely ones, with their log-probs. It has the
    attributes that vLLM's output processor reads of a `LogprobsProcessor`; vLLM passes `logprobs` on in its output."""

    prompt_logprobs = prompt_token_id_logprobs = cumulative_logprob = None

    def __init__(self, best: int) -> None:
        self._width, self._count = best + 1, 0
        self._ids = numpy.empty((_FIRST_ROWS, self._width), numpy.int32)
        self._logprobs = numpy.empty((_FIRST_ROWS, self._width), numpy.float32)

    def update_from_output(self, output: Any) -> None:
        """Add the rows of one step (an `EngineCoreOutput`)."""
        rows = output.new_logprobs
        if rows is None:
            return
        end = self._count + len(rows.logprobs)
        while end > len(self._ids):
            self._ids = numpy.concatenate([self._ids, numpy.empty_like(self._ids)])
            self._logprobs = numpy.concatenate([self._logprobs, numpy.empty_like(self._logprobs)])
        # Copied: the rows are views of a table of all requests of the step. It is wider if another request records more ids.
        self._ids[self._count : end] = rows.logprob_token_ids[:, : self._width]
        self._logprobs[self._count : end] = rows.logprobs[:, : self._width]
        self._count = end

    @property
    def logprobs(self) -> SampledRows:
        return self

    @property
    def ids_table(self) -> Ids:
        """[tokens, 1 + best] int32, the sampled id first."""
        return self._ids[: self._count]

    @property
    def logprobs_table(self) -> Logprobs:
        """[tokens, 1 + best] float32, -inf for ids that top-k or top-p cut."""
        return self._logprobs[: self._count]

    def clear(self) -> None:
        self._count = 0


@dataclass(frozen=True, eq=False)
class Episode:
    """A trajectory of several turns behind which another is drawn (`rollout/episodes.py`)."""

    before: Response
    """Turns of the trajectory and what followed them; `finish` has no meaning."""
    turn: Response | None = None
    """The turn that was drawn last, if its environment has not answered it."""
    observation: Ids | None = None
    """Ids that follow the summary which is drawn now; None if none is."""


class Drawn(NamedTuple):
    """Closed segments of a response, of the last turn of an episode. kept: the ids that their tokens were drawn from, one per
    segment; () if none are recorded."""

    segments: tuple[Segment, ...] = ()
    kept: tuple[KeptIds, ...] = ()
    episode: Episode | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    def first(self, num_tokens: int) -> Drawn:
        """Return the part of the first `num_tokens` tokens."""
        segments, left = [], num_tokens
        for tokens, logprobs, version in ((one.tokens, one.logprobs, one.version) for one in self.segments):
            if left > 0:
                segments.append(Segment(tokens[:left], None if logprobs is None else logprobs[:left], version))
            left -= len(tokens)
        kept = KeptIds.joined(self.kept)
        return Drawn(tuple(segments), () if kept is None else (kept.first(num_tokens),))


@dataclass
class Drawing:
    """A request that vLLM answers. rows: of the segment that is open, which present weights draw."""

    request: Request
    sampling: SamplingParams
    rows: SampledRows
    drawn: Drawn
    internal: str = ""
    """vLLM's own name of the request."""

    def close_segment(self, version: int) -> None:
        """Add what has been drawn since the last call as a segment of these weights."""
        ids, logprobs = self.rows.ids_table, self.rows.logprobs_table
        if len(ids):
            segment = Segment(ids[:, 0].copy(), logprobs[:, 0].copy(), version)
            kept = (top_k_ids(ids, logprobs),) if ids.shape[1] > 1 else ()
            self.drawn = Drawn((*self.drawn.segments, segment), (*self.drawn.kept, *kept))
        self.rows.clear()

    def rest(self) -> Request:
        """Return the request of the next segment, as if the closed ones were given."""
        count = self.drawn.num_tokens
        if not count:
            return self.request  # with the seed of a run without pushes
        # vLLM cannot set a generator forward: the same seed would repeat draws. Not the factor of `turns.py`, or segments of one
        # turn would have the seeds of others.
        seed = (self.request.seed + 0xBF58476D1CE4E5B9 * count) % 2**63
        before, limit = (*self.request.before, *self.drawn.segments), self.request.limit(self.sampling)
        return replace(self.request, before=before, seed=seed, max_tokens=limit - count)


def response_of(
    drawing: Drawing,
    output: Any,
    version: int,
    stop: Sequence[str] = (),
    detokenize: Detokenize | None = None,
    routes: Routes | None = None,
) -> Response:
    """Make a response of a finished `CompletionOutput`. stop: strings that vLLM did not look for in all of it; they end it here.
    RuntimeError if vLLM ended the request for another reason than stop or length."""
    number, finish = drawing.request.number, output.finish_reason
    if finish not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended request {number} with {finish!r}")
    open_tokens = drawing.rows.ids_table[:, 0]
    # With its cache kept, vLLM's output has the closed segments too
    sampled = numpy.fromiter(output.token_ids, numpy.int32, len(output.token_ids))[-len(open_tokens) :]
    assert numpy.array_equal(open_tokens, sampled), "vLLM gives the sampled token first"
    drawing.close_segment(version)
    response = Response(number, drawing.drawn.segments, finish, KeptIds.joined(drawing.drawn.kept), routes=routes)
    if stop:
        assert detokenize is not None
        found = stop_length(response.tokens, stop, detokenize)
        if found is not None:
            segments, kept, _ = drawing.drawn.first(found)
            response = Response(number, segments, "stop", KeptIds.joined(kept), routes=routes)
    return response


def top_k_ids(ids: Ids, logprobs: Logprobs) -> KeptIds:
    """Return the ids that were not cut, from tables [tokens, 1 + best] whose first column is the sampled id."""
    kept = logprobs > -numpy.inf
    # The sampled id appears again among the best; if more ids tie than were requested, it may be missing and replaces the last.
    kept[:, 0] &= ~(kept[:, 1:] & (ids[:, 1:] == ids[:, :1])).any(1)
    kept[:, -1] &= ~kept[:, 0]
    return KeptIds.where(ids, kept)


def stop_length(tokens: Ids, stop: Sequence[str], detokenize: Detokenize) -> int | None:
    """Return the number of tokens up to the one that completes a stop string; None if there is none."""
    ids = tokens.tolist()

    def stopped(length: int) -> bool:
        text = detokenize(ids[:length])
        return any(string in text for string in stop)

    if not stopped(len(ids)):
        return None
    return bisect_left(range(len(ids) + 1), True, key=stopped)  # once complete, a stop string stays in the text
