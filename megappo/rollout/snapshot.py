"""State of a replica at a push of an asynchronous run, as a file of a checkpoint: what its requests have drawn, and where its log
is. Requests that have not begun are not in it: the training half knows their prompts."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from megappo.rollout.types import Context, Ids, KeptIds, Played, Response, Routes, Segment, joined
from megappo.rollout.vllm_outputs import Drawn, Episode

_COLUMNS = {"tokens": numpy.int32, "logprobs": numpy.float32, "counts": numpy.int32, "ids": numpy.int32, "routes": numpy.uint8}


@dataclass(frozen=True)
class Snapshot:
    """running: what has been drawn for requests in work, by number in the engine, in their order there; empty for those that wait
    in it. finished: responses that the training half does not have yet. is_dealt_anew: some requests are not with the replica that
    they were dealt to at first, which was lost."""

    replica: int
    num_evaluations: int
    engine_step: int
    num_events: int
    running: Mapping[int, Drawn]
    finished: Sequence[Response]
    is_dealt_anew: bool = False

    def encoded(self) -> bytes:
        of = [self.replica, self.num_evaluations, self.engine_step, self.num_events, self.is_dealt_anew]
        return packed(of, self.running, self.finished)

    @classmethod
    def decoded(cls, data: bytes) -> Snapshot:
        (replica, num_evaluations, engine_step, num_events, *is_dealt_anew), running, finished = unpacked(data)
        return cls(replica, num_evaluations, engine_step, num_events, running, finished, any(is_dealt_anew))


def packed(about: Any, running: Mapping[int, Drawn], finished: Sequence[Response]) -> bytes:
    """Return JSON and columns of all tokens, nothing pickled. about: JSON value that goes with them. running, finished: as in
    `Snapshot`."""
    to = _Writer()
    facts = {
        "about": about,
        "running": [(number, to.drawn(drawn)) for number, drawn in running.items()],
        "finished": [to.response(one) for one in finished],
    }
    file = io.BytesIO()
    arrays = {name: joined(to.columns[name], dtype) for name, dtype in _COLUMNS.items()}
    arrays["facts"] = numpy.frombuffer(json.dumps(facts).encode(), numpy.uint8)
    numpy.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def unpacked(data: bytes) -> tuple[Any, dict[int, Drawn], list[Response]]:
    """Return the arguments of `packed`. ValueError if the bytes are something else."""
    with numpy.load(io.BytesIO(data), allow_pickle=False) as file:
        facts: Any = json.loads(file["facts"].tobytes())
        of = _Reader({name: file[name] for name in _COLUMNS})
    running = {number: of.drawn(*fields) for number, fields in facts["running"]}
    return facts["about"], running, [of.response(*fields) for fields in facts["finished"]]


class _Writer:
    """Puts arrays at the ends of the columns; returns JSON of all else, which `_Reader` takes in the same order."""

    def __init__(self) -> None:
        self.columns: dict[str, list[numpy.ndarray]] = {name: [] for name in _COLUMNS}

    def drawn(self, one: Drawn) -> list:
        of_turn, episode = self._segments(one.segments, KeptIds.joined(one.kept)), one.episode
        if episode is None:
            return [*of_turn, None]
        before, turn = self.response(episode.before), None if episode.turn is None else self.response(episode.turn)
        return [*of_turn, [before, turn, self._ids(episode.observation)]]

    def response(self, one: Response) -> list:
        contexts = [[self._ids(context.prompt), *self._segments(context.segments, context.kept)] for context in one.contexts]
        played = None if one.played is None else list(vars(one.played).values())
        last = [self._ids(one.prompt), *self._segments(one.segments, one.kept)]
        return [one.number, one.finish, contexts, last, one.fault, played, one.verdicts, self._routes(one.routes)]

    def _routes(self, routes: Routes | None) -> list[int] | None:
        if routes is None:
            return None
        self.columns["routes"].append(numpy.ascontiguousarray(routes.experts).view(numpy.uint8).reshape(-1))
        return [routes.first, *routes.experts.shape, routes.experts.itemsize]

    def _segments(self, segments: Sequence[Segment], kept: KeptIds | None) -> list:
        facts = [(self._ids(one.tokens), one.logprobs is not None, one.version) for one in segments]
        self.columns["logprobs"] += [one.logprobs for one in segments if one.logprobs is not None]
        if kept is not None:
            self.columns["counts"].append(kept.counts)
            self.columns["ids"].append(kept.ids)
        return [facts, None if kept is None else (len(kept.counts), len(kept.ids))]

    def _ids(self, ids: Ids | None) -> int | None:
        if ids is None:
            return None
        self.columns["tokens"].append(ids)
        return len(ids)


class _Reader:
    def __init__(self, columns: Mapping[str, numpy.ndarray]) -> None:
        self._columns, self._taken = columns, dict.fromkeys(columns, 0)

    def drawn(self, segments: Any, kept: Any, of_episode: Any) -> Drawn:
        of_turn, ids = self._segments(segments, kept)
        episode = None
        if of_episode is not None:
            before, turn, observation = of_episode
            last = self.response(*before), None if turn is None else self.response(*turn)
            episode = Episode(*last, self._ids(observation))
        return Drawn(of_turn, () if ids is None else (ids,), episode)

    def response(
        self, number: int, finish: Any, contexts: Any, last: Any, fault: str | None, played: Any, verdicts: Any, routes: Any
    ) -> Response:
        earlier = tuple(Context(self._take("tokens", prompt), *self._segments(*of)) for prompt, *of in contexts)
        prompt = self._ids(last[0])
        segments, kept = self._segments(*last[1:])
        if played is not None:
            turns, seconds, *rest = played
            played = Played(turns, tuple(seconds), *rest)
        return Response(number, segments, finish, kept, earlier, prompt, fault, played, self._routes(routes), verdicts)

    def _routes(self, facts: Any) -> Routes | None:
        if facts is None:
            return None
        first, rows, width, size = facts
        experts = self._take("routes", rows * width * size).view(numpy.uint8 if size == 1 else numpy.int16)
        return Routes(first, experts.reshape(rows, width))

    def _segments(self, segments: Any, kept: Any) -> tuple[tuple[Segment, ...], KeptIds | None]:
        found = tuple(
            Segment(self._take("tokens", length), self._take("logprobs", length) if sampled else None, version)
            for length, sampled, version in segments
        )
        return found, None if kept is None else KeptIds(self._take("counts", kept[0]), self._take("ids", kept[1]))

    def _ids(self, length: int | None) -> Ids | None:
        return None if length is None else self._take("tokens", length)

    def _take(self, name: str, count: int) -> numpy.ndarray:
        self._taken[name] += count
        return self._columns[name][self._taken[name] - count : self._taken[name]]
