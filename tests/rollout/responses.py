"""Requests and responses for tests: short to make, and as Python values that compare and pickle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy
import torch.distributed as dist

from megappo.rollout.generation import generate
from megappo.rollout.types import KeptIds, Request, Response, RolloutEngine, SamplingParams, Segment


def numbered(requests: Sequence[Request]) -> list[Request]:
    """The requests as a batch of their own."""
    return [dataclasses.replace(request, number=number) for number, request in enumerate(requests)]


def gather_responses(responses: Sequence[Response], count: int, group: dist.ProcessGroup | None = None) -> list[Response]:
    """Gather all responses of a batch of `count` on every rank of the group, by number. Collective.

    RuntimeError if a response is missing.
    """
    everywhere: list[Sequence[Response]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, responses, group=group)
    found = {response.number: response for part in everywhere for response in part}
    missing = [number for number in range(count) if number not in found]
    if missing:
        raise RuntimeError(f"no replica answered request {missing[0]} ({len(missing)} of {count} in all)")
    return [found[number] for number in range(count)]


def generate_all(engine: RolloutEngine, requests: Sequence[Request], sampling: SamplingParams) -> list[Response]:
    """The responses to a list of requests, in its order, on every rank. Collective."""
    return gather_responses(generate(engine, numbered(requests), sampling), len(requests))


def segment(tokens: Sequence[int], logprobs: Sequence[float] | None, version: int = 0) -> Segment:
    given = None if logprobs is None else numpy.array(logprobs, numpy.float32)
    return Segment(numpy.array(tokens, numpy.int32), given, version)


def kept_of(rows: Sequence[Sequence[int]]) -> KeptIds:
    """Kept ids of every sampled token."""
    counts = numpy.array([len(row) for row in rows], numpy.int32)
    return KeptIds(counts, numpy.array([one for row in rows for one in row], numpy.int32))


def answered(
    tokens: Sequence[int],
    logprobs: Sequence[float] | None = None,
    finish: Literal["stop", "length"] = "stop",
    number: int = 0,
    kept: Sequence[Sequence[int]] | None = None,
) -> Response:
    """A response of one sampled segment; its log-probs are 0 unless they are given."""
    values = [0.0] * len(tokens) if logprobs is None else logprobs
    return Response(number, (segment(tokens, values),), finish, None if kept is None else kept_of(kept))


def plain(responses: Sequence[Response]) -> list[dict[str, Any]]:
    """All that is in the responses, but for their numbers."""
    return [
        {
            "tokens": response.tokens.tolist(),
            "logprobs": response.logprobs.tolist(),
            "finish": response.finish,
            "versions": [one.version for one in response.segments],
            "kept": None if response.kept is None else (response.kept.counts.tolist(), response.kept.ids.tolist()),
        }
        for response in responses
    ]


def going_on(request: Request, response: Response) -> Request:
    """For the tokens 5 to 8 of a response to the request."""
    (segment,) = response.segments
    begun = Segment(segment.tokens[:5], None if segment.logprobs is None else segment.logprobs[:5], segment.version)
    return dataclasses.replace(request, before=(begun,), max_tokens=4, goes_on=True)


def sequence(request: Request, response: Response) -> list[int]:
    """Prompt and response."""
    return [*request.prompt, *response.tokens.tolist()]
