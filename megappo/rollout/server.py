"""The rollout half of an asynchronous run: a loop of its own on the ranks of every replica. It hears messages before each engine
step, begins requests, and announces batches whose responses it has. Pushes, hand-overs and snapshots are meetings with the training
half. Responses depend on the seeds of samples and on the engine steps of the event log, on no clock."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from megappo.parallel.consensus import gathered
from megappo.rollout.batches import FIRST_EVALUATION, Batch, Batches
from megappo.rollout.channel import GivenUp
from megappo.rollout.episodes import Episodes
from megappo.rollout.event_log import HAND_OVER, JOINED, LOSS, LOST, PUSHES, RECOMPUTED, Event, EventLog
from megappo.rollout.generation import told_by_leader
from megappo.rollout.half import CANARY, GREEDY
from megappo.rollout.hand_over import exchanged_by_rank, give_responses
from megappo.rollout.meetings import Guests
from megappo.rollout.snapshot import Snapshot
from megappo.rollout.types import BATCH, Request, Response, SamplingParams
from megappo.rollout.vllm_engine import VllmEngine
from megappo.rollout.vllm_outputs import Drawn

if TYPE_CHECKING:
    from megappo.data.prompts import Prompt

logger = logging.getLogger(__name__)

T = TypeVar("T")
_IDLE_S = 0.002  # between looks for messages; one look at the store takes 0.1 ms
_MEETINGS = {"push", "hand_over", "snapshot", "regroup", "join", "stop"}
_GIVEN_UP = -1  # in place of a number of messages
_FIRST_BESIDE = {CANARY: 2 * 10**6, GREEDY: 3 * 10**6}  # by steps, so that a resume draws them again under the log's numbers
_OF_PUSH = ("requests_cut", "tokens_recomputed")
_COUNTED = ("idle_s", "engine_steps", *_OF_PUSH)


@dataclass(frozen=True)
class RequestSource:
    """Builds the requests that messages name, the same on all ranks. of_step: of a step, the rows of prompts and
    the number of samples before them. of_evaluation: of a set, with its sampling. sampling: of training. of_beside: of CANARY or
    GREEDY, a step and rows, with its sampling."""

    of_step: Callable[[int, Sequence[int], int], Sequence[Request]]
    of_evaluation: Callable[[str], tuple[Sequence[Request], SamplingParams]]
    sampling: SamplingParams
    of_beside: Callable[[str, int, Sequence[int]], tuple[Sequence[Request], SamplingParams]]


class Rewards(Protocol):
    """Rewards that the rollout half computes as responses finish. Numbers are those in the engine."""

    def start(self, number: int, response: Response, prompt: Prompt) -> None: ...

    def take(self) -> dict[int, dict[str, list[Any]]]:
        """Return what was found since the last call: response -> part -> values (`Response.verdicts`)."""
        ...


def serve(
    engine: VllmEngine | Episodes,
    meetings: Guests,
    source: RequestSource,
    events: EventLog,
    read: Callable[[str], Sequence[bytes]],
    between_steps: Callable[[], None] = lambda: None,
    rewards: Rewards | None = None,
    *,
    joins: bool = False,
) -> bool:
    """Answer requests until the training half says stop; return whether it has finished. engine: in an environment, what plays its
    turns. meetings: of this rank. read: the snapshots in a checkpoint's directory. between_steps: called before each look for
    messages. rewards: of steps' responses, on the first rank of a replica. joins: this replica was lost, and takes part again."""
    while True:
        server = _Server(engine, meetings, source, events, read, rewards)
        try:
            return (not joins or server.join(between_steps)) and server.run(between_steps)
        except GivenUp as error:  # taken for lost, as it was silent, or lost in the run that is repeated
            if not events.begins_again:
                logger.warning("%s; it ends", error)
                return False
            server.drop()
            meetings.leave()
            events.begin_again()
            joins = True


class _Server:
    def __init__(
        self,
        engine: VllmEngine | Episodes,
        meetings: Guests,
        source: RequestSource,
        events: EventLog,
        read: Callable[[str], Sequence[bytes]],
        rewards: Rewards | None = None,
    ) -> None:
        self._rewards = rewards
        self._unjudged: dict[int, bool] = {}  # finished responses -> whether their rewards have begun
        self._episodes = engine if isinstance(engine, Episodes) else None
        self._asked = engine  # for responses
        self._engine = engine = engine.vllm if isinstance(engine, Episodes) else engine
        self._meetings, self._channel, self._source = meetings, meetings.channel, source
        self._training_ranks, self._log, self._read = meetings.seats.training, events, read
        self._index, self._replicas = engine.replica.index, engine.replica.count
        self._copies: Mapping[int, bytes] = {}  # of other replicas' snapshots, by replica, on the first rank of this one
        self._is_copied = False
        meetings.of(self._index, engine.replica.group)
        assert engine.replica.max_running is not None
        self._group, self._max_running = engine.replica.group, engine.replica.max_running
        with engine.in_world():
            self._is_leader = engine.replica.is_leader
        self._messages: deque[Mapping[str, Any]] = deque()
        self._batches = Batches(self._index, self._replicas, self._announce)
        self._engine_step = self._num_evaluations = 0
        self._has_weights = self._has_average = False
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
                case "regroup":
                    self._regroup(meeting)
                case "join":
                    self._join(meeting)
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
            else:
                self._engine_step += 1
                self._figures["engine_steps"] += 1
                self._note(self._engine.poll, self._engine.num_unfinished)
            if self._has_weights:
                if self._episodes is not None:
                    self._answer(self._episodes)
                self._judge()

    def _hear(self) -> None:
        count = self._channel.num_new() if self._is_leader else 0
        if self._is_leader and not count and self._meetings.are_voted and self._channel.lost([self._index]):
            count = _GIVEN_UP
        if (count := told_by_leader(count, self._group, "to look for messages")) == _GIVEN_UP:
            self._channel.require_member(self._index)
        for _ in range(count):
            self._messages.append(self._channel.hear())
        while self._messages and self._messages[0]["kind"] not in _MEETINGS:
            match self._messages.popleft():
                case {"kind": "requests", "step": step, "rows": rows}:
                    self._admit(step, rows)
                case {"kind": "refill", "step": step, "rows": rows, "before": before}:
                    # Of its numbers none is in use: the step's batch before it was handed over.
                    self._begin_first(step, f"step/{step}", self._source.of_step(step, rows, before), self._source.sampling)
                case {"kind": "evaluation", "key": key, "set": name}:
                    self._begin_first(FIRST_EVALUATION + self._num_evaluations, key, *self._source.of_evaluation(name))
                    self._num_evaluations += 1
                case {"kind": "beside", "name": name, "step": step, "rows": rows}:
                    self._begin_first(_FIRST_BESIDE[name] + step, f"{name}{step}", *self._source.of_beside(name, step, rows))
                case {"kind": "restore", "path": path, "steps": steps}:
                    self._restore(path, {int(step): rows for step, rows in steps.items()})  # JSON's keys are text
                case other:
                    raise AssertionError(f"message {other}")

    def _is_due(self, meeting: Mapping[str, Any]) -> bool:
        """A meeting of a replay that the log knows waits for its engine step."""
        kind, event = meeting["kind"], self._next_event()
        kinds = {
            "push": PUSHES,
            "hand_over": (HAND_OVER,) if self._meetings.are_voted else None,
            "regroup": (LOSS,),
            "join": (JOINED,),
        }.get(kind)
        if kinds is None or event is None or event.kind == LOST or self._index not in meeting.get("live", [self._index]):
            return True
        return event.kind in kinds and event.engine_step == self._engine_step

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
            waits_for_others = bool(self._unjudged) or (self._episodes is not None and self._episodes.num_open > 0)
            self._figures["idle_s"] += (time.perf_counter() - began) * (self._has_weights and not waits_for_others)

    def _begin(self) -> None:
        """Begin the requests that fit, in order; in a replay those of the log."""
        while (event := self._next_event()) is not None:
            if event.kind != "a" or event.engine_step != self._engine_step:
                return
            place = next((place for place, request in enumerate(self._batches.waiting) if request.number == event.first), None)
            if place is None:  # its message has not come
                return
            self._log.script.popleft()
            self._take(place, event.count)
        count = max(0, self._max_running - self._engine.num_running)
        if self._has_average:  # evaluations wait before all else
            count = min(count, sum(request.number >= FIRST_EVALUATION * BATCH for request in self._batches.waiting))
        self._take(0, count)

    def _take(self, place: int, count: int) -> None:
        taken = self._batches.waiting[place : place + count]
        if taken:
            del self._batches.waiting[place : place + count]
            self._log.requests(self._engine_step, [request.number for request in taken])
            self._submit(taken)

    def _submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            drawn = {request.number: self._batches.drawn.pop(request.number, Drawn())}
            self._asked.submit([request], self._batches.of(request.number).sampling, drawn)

    def _answer(self, episodes: Episodes) -> None:
        """Let trajectories go on whose turns are answered; in a replay by the log, as it says."""
        answers = episodes.answers() if self._next_event() is None else self._of_log("o", episodes.waits_for)
        for number, answer in answers.items():
            self._log.answer(self._engine_step, number, answer)
        self._store(episodes.go_on(answers))

    def _judge(self) -> None:
        """Take the verdicts that have come; in a replay those of the log, which all ranks of the replica read."""
        if self._next_event() is not None:
            found = self._of_log("v", lambda number: self._rewards is None or number in self._unjudged)
        else:
            found = {} if self._rewards is None else self._found(self._rewards)
        for number, verdicts in found.items():
            self._log.verdicts(self._engine_step, number, verdicts)
            if self._unjudged.pop(number, None) is not None:
                batch = self._batches.of(number)
                batch.responses[number] = replace(batch.responses[number], verdicts=verdicts)
                self._batches.finish_one(batch)

    def _found(self, rewards: Rewards) -> dict[int, dict[str, list[Any]]]:
        for number in [number for number, has_begun in self._unjudged.items() if not has_begun]:
            batch = self._batches.of(number)
            prompt = batch.prompts[number]
            assert prompt is not None, "requests of a run know their prompts"
            rewards.start(number, batch.responses[number], prompt)
            self._unjudged[number] = True
        return rewards.take() if self._unjudged else {}

    def _of_log(self, kind: str, waits: Callable[[int], bool]) -> dict[int, Any]:
        """Return the values that a replay has next, of events of this kind, by the request's number. waits: whether it waits for
        one."""
        found: dict[int, Any] = {}
        while (event := self._next_event()) is not None and (event.kind, event.engine_step) == (kind, self._engine_step):
            if not waits(event.first) or event.first in found:
                raise RuntimeError(f"the replay has left its log: at engine step {self._engine_step} nothing waits for {event}")
            found[event.first] = event.value
            self._log.script.popleft()
        return found

    def _note(self, ended: Callable[[], list[Response]], unfinished: int) -> None:
        """Store the responses of `ended` on all ranks of the replica, each of which has its own. unfinished: requests before."""
        responses = ended()
        if self._group is not None and self._engine.num_unfinished < unfinished:
            responses = [response for part in gathered(responses, self._group) for response in part]
        responses = sorted(responses, key=lambda one: one.number)
        self._store(responses if self._episodes is None else self._episodes.take(responses))

    def _store(self, responses: Sequence[Response]) -> None:
        for response in responses:
            batch = self._batches.of(response.number)
            batch.responses[response.number] = response
            if self._rewards is None or response.verdicts is not None or response.number >= FIRST_EVALUATION * BATCH:
                self._batches.finish_one(batch)
            else:
                self._unjudged[response.number] = False

    def _announce(self, key: str) -> None:
        if self._is_leader:
            self._channel.announce(key, self._index)

    # --------------------------------------------------------------------------------------------------------- messages

    def _begin_first(self, number: int, key: str, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """Put a batch before all that waits. No push is sent before it is handed over, so one version draws all of it."""
        self._batches.waiting[:0] = self._open(number, key, requests, sampling)

    def _admit(self, step: int, rows: Sequence[int]) -> None:
        self._batches.waiting += self._open(step, f"step/{step}", self._source.of_step(step, rows, 0), self._source.sampling)

    def _open(self, number: int, key: str, requests: Sequence[Request], sampling: SamplingParams) -> list[Request]:
        """Return this replica's requests."""
        return self._batches.begin(number, Batch(key, requests, sampling))

    def _restore(self, path: str, steps: Mapping[int, Sequence[int]]) -> None:
        """Go on from a checkpoint; its replicas' requests are dealt to those of now."""
        parts = sorted(map(Snapshot.decoded, self._read(path)), key=lambda part: part.replica)
        for step in sorted(steps):
            self._admit(step, steps[step])
        self._store(self._batches.restore(parts))
        if [part.replica for part in parts] == list(range(self._replicas)) and not any(part.is_dealt_anew for part in parts):
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
        if (event := self._next_event()) is not None and event.kind in PUSHES:
            recompute = event.kind == RECOMPUTED
            self._log.script.popleft()
        unfinished = self._engine.num_unfinished
        of = self._index, self._num_evaluations, self._engine_step, self._log.num_events

        def logged() -> None:
            self._log.push(self._engine_step, version, recompute=recompute)

        def held(action: Callable[[], dict[str, float]]) -> dict[str, float]:
            return self._until_it_counts(action, "push", logged)

        metrics = self._engine.push_weights(version, recompute=recompute, held=held)
        with self._engine.between_pushes():
            self._note(self._engine.ended_in_push, unfinished)
            if not self._has_weights:  # after a checkpoint's push what ran goes on, without an event
                self._submit(self._batches.take_begun())
        # References: nothing of it changes. Requests of a lost replica may wait.
        drawn = {**self._asked.drawn(), **self._batches.drawn}
        self._snapshot = Snapshot(*of, drawn, self._batches.responses(), self._batches.are_dealt_anew)
        self._is_copied = False
        self._has_weights, self._has_average = True, version < 0
        for name in _OF_PUSH:
            self._figures[name] += metrics[name]

    def _hand_over(self, key: str) -> None:
        number, batch = next((number, batch) for number, batch in self._batches.by_number.items() if batch.key == key)
        assert not batch.left, f"{key} was announced"
        if (event := self._next_event()) is not None and event.kind == HAND_OVER:
            self._log.script.popleft()
        is_voted = self._meetings.are_voted

        def logged() -> None:
            if is_voted:
                self._log.hand_over(self._engine_step, number)

        counts, came = self._meetings.take_part(partial(self._given, batch), self._marked(logged))
        if not counts:
            self._log.take_back()
            return  # the lost replica's part is drawn first
        if is_voted and not self._is_copied:
            replicas = {position: replica for replica, position in self._leaders().items()}
            self._copies, self._is_copied = {replicas[position]: content for position, content in (came or {}).items()}, True
        del self._batches.by_number[number]
        if number < FIRST_EVALUATION:
            self._figures = dict.fromkeys(_COUNTED, 0.0)

    def _given(self, batch: Batch) -> Mapping[int, bytes]:
        if not self._is_leader:
            return exchanged_by_rank({})
        responses = [replace(response, number=response.number % BATCH) for response in batch.responses.values()]
        in_flight = self._engine.num_drawn + self._batches.num_drawn(besides=batch)
        figures = {**self._figures, "running": float(self._engine.num_running), "in_flight": float(in_flight)}
        copies = {}
        if self._meetings.are_voted and not self._is_copied and self._snapshot is not None:
            live = self._channel.live  # the next one keeps it
            copies[self._leaders()[live[(live.index(self._index) + 1) % len(live)]]] = self._snapshot.encoded()
        return give_responses(responses, len(batch.requests), figures, self._training_ranks, copies)

    def _leaders(self) -> dict[int, int]:
        return self._meetings.seats.leader_positions(self._channel.live)

    def _give_snapshot(self) -> None:
        def given() -> None:
            assert self._snapshot is not None, "a push comes first"
            exchanged_by_rank({self._index % self._training_ranks: self._snapshot.encoded()} if self._is_leader else {})

        self._until_it_counts(given, "snapshot")

    # ----------------------------------------------------------------------------------------------------- lost replicas

    def _marked(self, logged: Callable[[], None]) -> Callable[[], None]:
        """Return `logged`, whose events `EventLog.take_back` removes."""

        def mark() -> None:
            self._log.mark()
            logged()

        return mark

    def _until_it_counts(self, action: Callable[[], T], kind: str, logged: Callable[[], None] = lambda: None) -> T:
        """Take part in a meeting, again without the replicas that are lost, until it counts."""
        while True:
            counts, found = self._meetings.take_part(action, self._marked(logged))
            if counts:
                return cast(T, found)
            self._log.take_back()
            while (message := self._next_message())["kind"] == "regroup":
                self._regroup(message)
            assert message["kind"] == kind, f"{message} after a {kind} that does not count"

    def _next_message(self) -> Mapping[str, Any]:
        while not self._messages:
            with self._engine.in_world():
                self._hear()
                self._idle()
        return self._messages.popleft()

    def _regroup(self, meeting: Mapping[str, Any]) -> None:
        """Go on without replicas that are lost, and draw this one's share of their requests."""
        if self._index not in meeting["live"]:
            raise GivenUp(f"replica {self._index} was given up")
        lost: Sequence[int] = meeting["lost"]
        self._log.begin()
        self._meetings.go_on_with(meeting["live"])
        if (event := self._next_event()) is not None and event.kind == LOSS:
            self._log.script.popleft()

        def renewed() -> list[bytes]:
            self._meetings.renew()
            with self._meetings.entered():
                self._engine.reroute(self._meetings.seats.engine_positions(meeting["live"]))
                found = [part for one in lost for part in self._shared(one)]
            if self._group is not None:
                with self._engine.in_world():
                    found = gathered(found, self._group)[0]
            return found

        def logged() -> None:
            self._log.change(LOSS, self._engine_step, lost, meeting["at"])

        counts, copies = self._meetings.take_part(renewed, self._marked(logged))
        if not counts:
            self._log.take_back()
            return
        self._copies, self._is_copied = {}, False
        self._store(self._batches.lose(lost, [Snapshot.decoded(content) for content in copies or ()]))

    def _shared(self, lost: int) -> list[bytes]:
        """Exchange the copy of a lost replica's snapshot between the first ranks of all that are left; [] if it is lost too."""
        if not self._is_leader:
            exchanged_by_rank({})
            return []
        copy = self._copies.get(lost)
        return list(exchanged_by_rank({} if copy is None else dict.fromkeys(self._leaders().values(), copy)).values())

    def join(self, between_steps: Callable[[], None]) -> bool:
        """Take part again, from the push that follows. False if the run is over first; GivenUp if the meeting does not count."""
        with self._engine.in_world():
            if not self._meetings.wait_to_join(between_steps):
                return False
        if not self._join(self._next_message()):
            raise GivenUp(f"replica {self._index} could not join")
        return True

    def drop(self) -> None:
        """Forget all requests, for another server of this engine."""
        with self._engine.between_pushes():
            self._engine.drop()
        if self._episodes is not None:
            self._episodes.drop()

    def _join(self, meeting: Mapping[str, Any]) -> bool:
        """Go on with a replica that was lost, from the push that follows; False if that does not count. It begins requests of later
        batches alone."""
        new, live = meeting["joins"], meeting["live"]
        self._log.begin()
        self._meetings.go_on_with(live)
        if (event := self._next_event()) is not None and event.kind == JOINED:
            self._log.script.popleft()

        def renewed() -> bytes:
            self._meetings.renew_with_new()
            leaders, tells = self._leaders(), next(one for one in live if one != new)
            with self._meetings.entered():
                self._engine.reroute(self._meetings.seats.engine_positions(live))
                told = {leaders[new]: self._known()} if self._is_leader and self._index == tells else {}
                known = next(iter(exchanged_by_rank(told).values()), b"")
            if self._group is not None:
                with self._engine.in_world():
                    known = gathered(known, self._group)[0]
            return known

        def logged() -> None:
            self._log.change(JOINED, self._engine_step, [new], meeting["at"])

        counts, known = self._meetings.take_part(renewed, self._marked(logged))
        if not counts:
            self._log.take_back()
            return False
        self._batches.deal_to(live)
        if new == self._index:
            self._learn(json.loads(known or b""), meeting["steps"])
        self._batches.announce_all()
        return True

    def _known(self) -> bytes:
        """Return what a replica that joins cannot know of its own."""
        batches = {number: batch.live_after for number, batch in self._batches.by_number.items()}
        return json.dumps({"num_evaluations": self._num_evaluations, "batches": batches}).encode()

    def _learn(self, known: Mapping[str, Any], steps: Mapping[str, Sequence[int]]) -> None:
        """Take part in handing over the batches that have begun, of which it draws nothing. steps: rows of each."""
        self._num_evaluations = known["num_evaluations"]
        for step, live_after in known["batches"].items():
            requests = self._source.of_step(int(step), steps[step], 0)
            self._batches.by_number[int(step)] = Batch(f"step/{step}", requests, self._source.sampling, live_after)
