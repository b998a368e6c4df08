"""State of a replica at a push of an asynchronous run, as a file of a checkpoint: what its requests have drawn, and where its log
is. Requests that have not begun are not in it: the training half knows their prompts."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy

from megappo.rollout.types import KeptIds, Response, Segment, joined
from megappo.rollout.vllm_outputs import Drawn

_COLUMNS = ("tokens", "logprobs", "counts", "ids")


@dataclass(frozen=True)
class Snapshot:
    """running: what has been drawn for requests in work, by number in the engine, in their order there; empty for those that wait
    in it. finished: responses that the training half does not have yet."""

    replica: int
    num_evaluations: int
    engine_step: int
    num_events: int
    running: Mapping[int, Drawn]
    finished: Sequence[Response]

    def encoded(self) -> bytes:
        of = [self.replica, self.num_evaluations, self.engine_step, self.num_events]
        return packed(of, self.running, self.finished)

    @classmethod
    def decoded(cls, data: bytes) -> Snapshot:
        (replica, num_evaluations, engine_step, num_events), running, finished = unpacked(data)
        return cls(replica, num_evaluations, engine_step, num_events, running, finished)


def packed(about: Any, running: Mapping[int, Drawn], finished: Sequence[Response]) -> bytes:
    """Return JSON and columns of all tokens, nothing pickled. about: JSON value that goes with them. running, finished: as in
    `Snapshot`."""
    samples = [(number, "", drawn) for number, drawn in running.items()]
    samples += [(one.number, one.finish, Drawn(one.segments, () if one.kept is None else (one.kept,))) for one in finished]
    segments = [segment for _, _, drawn in samples for segment in drawn.segments]
    kept = [KeptIds.joined(drawn.kept) for _, _, drawn in samples]
    facts = {
        "about": about,
        "samples": [(number, finish, len(drawn.segments)) for number, finish, drawn in samples],
        "segments": [(len(segment.tokens), segment.version) for segment in segments],
        "kept": [None if one is None else (len(one.counts), len(one.ids)) for one in kept],
    }
    file = io.BytesIO()
    numpy.savez(
        file,
        facts=numpy.frombuffer(json.dumps(facts).encode(), numpy.uint8),
        tokens=joined([one.tokens for one in segments], numpy.int32),
        logprobs=joined([one.logprobs for one in segments], numpy.float32),
        counts=joined([one.counts for one in kept if one is not None], numpy.int32),
        ids=joined([one.ids for one in kept if one is not None], numpy.int32),
    )
    return file.getvalue()


def unpacked(data: bytes) -> tuple[Any, dict[int, Drawn], list[Response]]:
    """Return the arguments of `packed`. ValueError if the bytes are something else."""
    with numpy.load(io.BytesIO(data), allow_pickle=False) as file:
        facts: Any = json.loads(file["facts"].tobytes())
        take = {name: _Column(file[name]) for name in _COLUMNS}
    tokens, logprobs = take["tokens"], take["logprobs"]
    segments = iter([Segment(tokens(length), logprobs(length), version) for length, version in facts["segments"]])
    running: dict[int, Drawn] = {}
    finished: list[Response] = []
    for (number, finish, count), sizes in zip(facts["samples"], facts["kept"], strict=True):
        parts = tuple(next(segments) for _ in range(count))
        kept = None if sizes is None else KeptIds(take["counts"](sizes[0]), take["ids"](sizes[1]))
        if finish:
            finished.append(Response(number, parts, cast(Literal["stop", "length"], finish), kept))
        else:
            running[number] = Drawn(parts, () if kept is None else (kept,))
    return facts["about"], running, finished


class _Column:
    """Array that is taken piece by piece."""

    def __init__(self, values: numpy.ndarray) -> None:
        self._values, self._taken = values, 0

    def __call__(self, count: int) -> numpy.ndarray:
        self._taken += count
        return self._values[self._taken - count : self._taken]
