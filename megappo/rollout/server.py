"""The rollout half of an asynchronous run: a loop of its own on the ranks of every replica. It hears messages before each engine
step, begins requests, and announces batches whose responses it has. Pushes, hand-overs and snapshots are meetings with the training
half. Responses depend on the seeds of samples and on the engine steps of the event log, on no clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megappo.parallel.consensus import gathered
from megappo.rollout.channel import Channel
from megappo.rollout.event_log import BATCH, PUSHES, RECOMPUTED, Event, EventLog
from megappo.rollout.generation import told_by_leader
from megappo.rollout.hand_over import exchanged_by_rank, give_responses
from megappo.rollout.snapshot import Snapshot
from megappo.rollout.types import Request, Response, SamplingParams
from megappo.rollout.vllm_engine import VllmEngine
from megappo.rollout.vllm_outputs import Drawn

_IDLE_S = 0.002  # between looks for messages; one look at the store takes 0.1 ms
_MEETINGS = {"push", "hand_over", "snapshot", "stop"}
_FIRST_EVALUATION = 10**6  # batches below are steps
_FIRST_CANARY = 2 * 10**6  # by their steps, so that a resume draws them again under the numbers of the log
_OF_PUSH = ("requests_cut", "tokens_recomputed")
_COUNTED = ("idle_s", "engine_steps", *_OF_PUSH)


@dataclass(frozen=True)
class RequestSource:
    """Builds the requests that messages name, the same on all ranks. of_step: of a step and the rows of its prompts.
    of_evaluation: of a set, with its sampling. sampling: of training. of_canary: of a step and rows, with its sampling."""

    of_step: Callable[[int, Sequence[int]], Sequence[Request]]
    of_evaluation: Callable[[str], tuple[Sequence[Request], SamplingParams]]
    sampling: SamplingParams
    of_canary: Callable[[int, Sequence[int]], tuple[Sequence[Request], SamplingParams]]


@dataclass
class _Batch:
    """Requests that are handed over together: those of a step or an evaluation. left: how many of them this replica answers yet."""

    key: str
    count: int
    sampling: SamplingParams
    left: int
    responses: list[Response] = field(default_factory=list)


def serve(
    engine: VllmEngine,
    channel: Channel,
    source: RequestSource,
    training_ranks: int,
    events: EventLog,
    read: Callable[[str], Sequence[bytes]],
    between_steps: Callable[[], None] = lambda: None,
) -> bool:
    """Answer requests until the training half says stop; return whether it has finished. training_ranks: their number; they are the
    first. read: the snapshots in a checkpoint's directory. between_steps: called before each look for messages."""
    return _Server(engine, channel, source, training_ranks, events, read).run(between_steps)


class _Server:
    def __init__(
        self,
        engine: VllmEngine,
        channel: Channel,
        source: RequestSource,
        training_ranks: int,
        events: EventLog,
        read: Callable[[str], Sequence[bytes]],
    ) -> None:
        self._engine, self._channel, self._source = engine, channel, source
        self._training_ranks, self._log, self._read = training_ranks, events, read
        self._index, self._replicas = engine.replica.index, engine.replica.count
        assert engine.replica.max_running is not None
        self._group, self._max_running = engine.replica.group, engine.replica.max_running
        with engine.in_world():
            self._is_leader = engine.replica.is_leader
        self._messages: deque[Mapping[str, Any]] = deque()
        self._batches: dict[int, _Batch] = {}
        self._waiting: list[Request] = []  # in the order in which they begin
        self._drawn: dict[int, Drawn] = {}  # of waiting requests that a checkpoint had begun
        self._engine_step = self._num_evaluations = 0
        self._has_weights = False
        self._snapshot: Snapshot | None = None
        self._figures = dict.fromkeys(_COUNTED, 0.0)  # since the last step was handed over

    def run(self, between_steps: Callable[[], None]) -> bool:
        while True:
            with self._engine.between_pushes():
                meeting = self._work(between_steps)
            match meeting["kind"]:
                case "push":
                    self._push(meeting["version"], meeting.get("recompute", False))
                case "hand_over":
                    self._hand_over(meeting["key"])
                case "snapshot":
                    self._give_snapshot()
                case "stop":
                    self._log.end(self._engine_step)
                    return meeting["finished"]

    # ------------------------------------------------------------------------------------------- between two meetings

    def _work(self, between_steps: Callable[[], None]) -> Mapping[str, Any]:
        """Run engine steps until a meeting is due, and return its message."""
        while True:
            between_steps()
            self._hear()
            if self._messages and self._is_due(self._messages[0]):
                return self._messages.popleft()
            if self._has_weights:
                self._begin()
            if self._must_wait() or not self._engine.num_unfinished:
                self._idle()
                continue
            self._engine_step += 1
            self._figures["engine_steps"] += 1
            self._note(self._engine.poll, self._engine.num_unfinished)

    def _hear(self) -> None:
        count = self._channel.num_new() if self._is_leader else 0
        for _ in range(told_by_leader(count, self._group, "to look for messages")):
            self._messages.append(self._channel.hear())
        while self._messages and self._messages[0]["kind"] not in _MEETINGS:
            match self._messages.popleft():
                case {"kind": "requests", "step": step, "rows": rows}:
                    self._admit(step, rows)
                case {"kind": "evaluation", "key": key, "set": name}:
                    self._begin_first(_FIRST_EVALUATION + self._num_evaluations, key, *self._source.of_evaluation(name))
                    self._num_evaluations += 1
                case {"kind": "canary", "key": key, "step": step, "rows": rows}:
                    self._begin_first(_FIRST_CANARY + step, key, *self._source.of_canary(step, rows))
                case {"kind": "restore", "path": path, "steps": steps}:
                    self._restore(path, {int(step): rows for step, rows in steps.items()})  # JSON's keys are text
                case other:
                    raise AssertionError(f"message {other}")

    def _is_due(self, meeting: Mapping[str, Any]) -> bool:
        """A push of a replay waits for its engine step."""
        event = self._next_event()
        return meeting["kind"] != "push" or event is None or (event.kind in PUSHES and event.engine_step == self._engine_step)

    def _next_event(self) -> Event | None:
        """Return the event that a replay has next; None if there is nothing to repeat (any more)."""
        return self._log.script[0] if self._log.script and self._log.script[0].kind != "e" else None

    def _must_wait(self) -> bool:
        """True in a replay if an event comes before the next engine step whose message has not come."""
        event = self._next_event()
        if event is None:
            return False
        if event.engine_step < self._engine_step or (event.engine_step > self._engine_step and not self._engine.num_unfinished):
            raise RuntimeError(f"the replay has left its log: replica {self._index} is at engine step {self._engine_step}, {event}")
        return event.engine_step == self._engine_step

    def _idle(self) -> None:
        if self._is_leader:  # the others wait for it
            began = time.perf_counter()
            time.sleep(_IDLE_S)
            self._figures["idle_s"] += (time.perf_counter() - began) * self._has_weights

    def _begin(self) -> None:
        """Begin the requests that fit, in order; in a replay those of the log."""
        while (event := self._next_event()) is not None:
            if event.kind != "a" or event.engine_step != self._engine_step:
                return
            place = next((place for place, request in enumerate(self._waiting) if request.number == event.first), None)
            if place is None:  # its message has not come
                return
            self._log.script.popleft()
            self._take(place, event.count)
        self._take(0, max(0, self._max_running - self._engine.num_running))

    def _take(self, place: int, count: int) -> None:
        taken = self._waiting[place : place + count]
        if taken:
            del self._waiting[place : place + count]
            self._log.requests(self._engine_step, [request.number for request in taken])
            self._submit(taken)

    def _submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            drawn = {request.number: self._drawn.pop(request.number, Drawn())}
            self._engine.submit([request], self._batches[request.number // BATCH].sampling, drawn)

    def _note(self, ended: Callable[[], list[Response]], unfinished: int) -> None:
        """Store the responses of `ended` on all ranks of the replica, each of which has its own. unfinished: requests before."""
        responses = ended()
        if self._group is not None and self._engine.num_unfinished < unfinished:
            responses = [response for part in gathered(responses, self._group) for response in part]
        self._store(sorted(responses, key=lambda one: one.number))

    def _store(self, responses: Sequence[Response]) -> None:
        for response in responses:
            batch = self._batches[response.number // BATCH]
            batch.responses.append(response)
            batch.left -= 1
            self._announce(batch)

    def _announce(self, batch: _Batch) -> None:
        if not batch.left and self._is_leader:
            self._channel.announce(batch.key, self._index)

    # --------------------------------------------------------------------------------------------------------- messages

    def _begin_first(self, number: int, key: str, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """Put a batch before all that waits. No push is sent before it is handed over, so one version draws all of it."""
        self._waiting[:0] = self._open(number, key, requests, sampling)

    def _admit(self, step: int, rows: Sequence[int]) -> None:
        self._waiting += self._open(step, f"step/{step}", self._source.of_step(step, rows), self._source.sampling)

    def _open(self, number: int, key: str, requests: Sequence[Request], sampling: SamplingParams) -> list[Request]:
        """Return this replica's requests, whole prompts, so that samples of one share its cached prefix."""
        mine = [one for one in requests if one.group % self._replicas == self._index]
        self._batches[number] = _Batch(key, len(requests), sampling, len(mine))
        self._announce(self._batches[number])
        return [replace(one, number=number * BATCH + one.number) for one in mine]

    def _restore(self, path: str, steps: Mapping[int, Sequence[int]]) -> None:
        """Go on from a checkpoint; its replicas' requests are dealt to those of now."""
        parts = sorted(map(Snapshot.decoded, self._read(path)), key=lambda part: part.replica)
        for step in sorted(steps):
            self._admit(step, steps[step])
        mine = {request.number for request in self._waiting}
        begun = {number: drawn for part in parts for number, drawn in part.running.items() if number in mine}
        ended = [response for part in parts for response in part.finished if response.number in mine]
        done = {response.number for response in ended}
        left = [request for request in self._waiting if request.number not in done]
        self._drawn, self._waiting = begun, sorted(left, key=lambda one: (one.number not in begun, one.number))
        self._store(ended)
        if len(parts) == self._replicas:
            part = parts[self._index]
            self._engine_step, self._num_evaluations = part.engine_step, part.num_evaluations
            self._log.resume(part.num_events)
        else:
            self._log.resume(None)

    # --------------------------------------------------------------------------------------------------------- meetings

    def _push(self, version: int, recompute: bool) -> None:
        """Push. recompute: a save is due after it, and a resume can only compute the cache of requests again; a replay does as the
        log."""
        self._log.begin()
        if (event := self._next_event()) is not None:
            recompute = event.kind == RECOMPUTED
            self._log.script.popleft()
        unfinished = self._engine.num_unfinished
        metrics = self._engine.push_weights(version, recompute=recompute)
        with self._engine.between_pushes():
            self._note(self._engine.ended_in_push, unfinished)
            if not self._has_weights:  # after a checkpoint's push what ran goes on, without an event
                count = min(len(self._drawn), self._max_running)
                resumed, self._waiting = self._waiting[:count], self._waiting[count:]
                self._submit(resumed)
        responses = [response for batch in self._batches.values() for response in batch.responses]
        of = self._index, self._num_evaluations, self._engine_step, self._log.num_events
        self._snapshot = Snapshot(*of, self._engine.drawn() | self._drawn, responses)  # references: nothing of it changes
        self._has_weights = True
        self._log.push(self._engine_step, version, recompute=recompute)
        for name in _OF_PUSH:
            self._figures[name] += metrics[name]

    def _hand_over(self, key: str) -> None:
        number, batch = next((number, batch) for number, batch in self._batches.items() if batch.key == key)
        assert not batch.left, f"{key} was announced"
        del self._batches[number]
        if not self._is_leader:
            exchanged_by_rank({})
            return
        responses = [replace(response, number=response.number % BATCH) for response in batch.responses]
        figures = {**self._figures, "running": float(self._engine.num_running), "waiting": float(len(self._waiting))}
        give_responses(responses, batch.count, figures, self._training_ranks)
        if number < _FIRST_EVALUATION:
            self._figures = dict.fromkeys(_COUNTED, 0.0)

    def _give_snapshot(self) -> None:
        assert self._snapshot is not None, "a push comes first"
        exchanged_by_rank({self._index % self._training_ranks: self._snapshot.encoded()} if self._is_leader else {})
