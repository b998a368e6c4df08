"""vLLM's outputs as arrays. `SampledRows` replaces vLLM's `LogprobsProcessor` for each request: it copies the sampler's rows in 3
us per token, where vLLM's lists of Python numbers take 13 us, or 54 us with `top_k: 50` recorded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from megappo.rollout.types import Ids, KeptIds, Logprobs, Response, Segment

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


def response_of(
    number: int, output: Any, rows: SampledRows, version: int, stop: Sequence[str] = (), detokenize: Detokenize | None = None
) -> Response:
    """Make a response of a finished `CompletionOutput`. stop: strings that vLLM did not look for; they end it here. RuntimeError if
    vLLM ended the request for another reason than stop or length."""
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended request {number} with {output.finish_reason!r}")
    ids, logprobs = rows.ids_table, rows.logprobs_table
    tokens = ids[:, 0].copy()
    sampled = numpy.fromiter(output.token_ids, numpy.int32, len(output.token_ids))
    assert numpy.array_equal(tokens, sampled), "vLLM gives the sampled token first"
    kept = top_k_ids(ids, logprobs) if ids.shape[1] > 1 else None
    finish, end = output.finish_reason, len(tokens)
    if stop:
        assert detokenize is not None
        found = stop_length(tokens, stop, detokenize)
        if found is not None:
            finish, end, kept = "stop", found, kept and kept.first(found)
    return Response(number, (Segment(tokens[:end], logprobs[:end, 0].copy(), version),), finish, kept)


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
