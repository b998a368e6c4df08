"""Requests of an asynchronous run as one replica sees them: batches that are handed over together, which of their requests are
dealt to it, also once others are lost or back, and what has been drawn of them. The server's books: no engine and no meeting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from megappo.rollout.snapshot import Snapshot
from megappo.rollout.types import BATCH, Request, Response, SamplingParams
from megappo.rollout.vllm_outputs import Drawn

if TYPE_CHECKING:
    from megappo.data.prompts import Prompt

FIRST_EVALUATION = 10**6
"""Number of a batch. Those below are of steps."""


@dataclass
class Batch:
    """Requests that are handed over together: those of a step or an evaluation. requests: of all replicas. live_after: replicas
    that were left when they were dealt, if not all, and after each loss since. left: how many of them this one answers yet, or
    judges. prompts, responses: by number in the engine."""

    key: str
    requests: Sequence[Request]
    sampling: SamplingParams
    live_after: list[Sequence[int]] = field(default_factory=list)
    left: int = 0
    prompts: dict[int, Prompt | None] = field(default_factory=dict)
    responses: dict[int, Response] = field(default_factory=dict)


class Batches:
    """index, replicas: number of this replica, and of all. announce: called with the name of a batch that this one has finished.
    by_number: those that were not handed over yet. waiting: requests, in the order in which they begin. drawn: of those, what a
    checkpoint or a lost replica had."""

    def __init__(self, index: int, replicas: int, announce: Callable[[str], None]) -> None:
        self._index, self._replicas, self._announce = index, replicas, announce
        self.by_number: dict[int, Batch] = {}
        self.waiting: list[Request] = []
        self.drawn: dict[int, Drawn] = {}
        self._live_after: list[Sequence[int]] = []  # each loss of a replica, while requests are dealt by it

    def of(self, request: int) -> Batch:
        """Return the batch of a number in the engine."""
        return self.by_number[request // BATCH]

    def begin(self, number: int, batch: Batch) -> list[Request]:
        """Deal the requests of a batch; return this replica's. They do not wait yet."""
        batch.live_after = list(self._live_after)
        mine = [_numbered(number, one) for one in batch.requests if self._is_mine(one, batch.live_after)]
        batch.left, batch.prompts = len(mine), {one.number: one.source for one in mine}
        self.by_number[number] = batch
        self._announce_if_done(batch)
        return mine

    def finish_one(self, batch: Batch) -> None:
        batch.left -= 1
        self._announce_if_done(batch)

    def announce_all(self) -> None:
        """Announce again what was: announcements are of a generation of replicas."""
        for batch in self.by_number.values():
            self._announce_if_done(batch)

    def _announce_if_done(self, batch: Batch) -> None:
        if not batch.left:
            self._announce(batch.key)

    @property
    def are_dealt_anew(self) -> bool:
        """True if requests are not with the replica that they would be dealt to with all there."""
        return any(batch.live_after for batch in self.by_number.values())

    def responses(self) -> list[Response]:
        return [response for batch in self.by_number.values() for response in batch.responses.values()]

    def num_drawn(self, besides: Batch) -> int:
        """Count the tokens of finished responses, and of what waits and had begun, but for one batch."""
        others = [batch for batch in self.by_number.values() if batch is not besides]
        ended = sum(response.num_sampled for batch in others for response in batch.responses.values())
        return ended + sum(drawn.num_tokens for drawn in self.drawn.values())

    def _is_mine(self, request: Request, live_after: Sequence[Sequence[int]]) -> bool:
        """True if a request is dealt to this replica. Whole prompts are, so that samples of one share its cached prefix.
        live_after: the replicas that are left after each loss."""
        turn, replica = divmod(request.group, self._replicas)
        for live in live_after:
            replica = replica if replica in live else live[turn % len(live)]
        return replica == self._index

    def restore(self, parts: Sequence[Snapshot]) -> list[Response]:
        """Let what waits go on from the snapshots of a checkpoint, whose replicas may have been others; return the responses that
        were finished."""
        mine = {request.number for request in self.waiting}
        begun = {number: drawn for part in parts for number, drawn in part.running.items() if number in mine}
        ended = [response for part in parts for response in part.finished if response.number in mine]
        done = {response.number for response in ended}
        left = [request for request in self.waiting if request.number not in done]
        places = {number: place for place, number in enumerate(begun)}  # in the engine, which may have more than run at once
        self.drawn, self.waiting = begun, sorted(left, key=lambda one: places.get(one.number, len(places)))
        return ended

    def take_begun(self) -> list[Request]:
        """Return what waits and had begun, which then waits in the engine if it is more than runs at once."""
        begun = [request for request in self.waiting if request.number in self.drawn]
        self.waiting = [request for request in self.waiting if request.number not in self.drawn]
        return begun

    def lose(self, lost: Sequence[int], parts: Sequence[Snapshot]) -> list[Response]:
        """Let the requests wait that are dealt to this replica without the lost ones and were not before. parts: snapshots of
        those, whose responses go on; what came later is drawn again. Returns the responses that were finished."""
        further, live = list[Sequence[int]](), self._live_after[-1] if self._live_after else range(self._replicas)
        for one in lost:
            live = [replica for replica in live if replica != one]
            further.append(live)
        self._live_after += further
        adopted: dict[int, Request] = {}
        for number, batch in self.by_number.items():
            before, batch.live_after = batch.live_after, [*batch.live_after, *further]
            mine = [one for one in batch.requests if self._is_mine(one, batch.live_after) and not self._is_mine(one, before)]
            new = {one.number: one for one in (_numbered(number, each) for each in mine)}
            batch.prompts |= {name: one.source for name, one in new.items()}
            batch.left += len(new)
            adopted |= new
        self.drawn |= {number: drawn for part in parts for number, drawn in part.running.items() if number in adopted}
        ended = {response.number: response for part in parts for response in part.finished if response.number in adopted}
        begin = [request for number, request in adopted.items() if number not in ended]

        def place(request: Request) -> tuple[bool, int]:
            return request.number < FIRST_EVALUATION * BATCH, request.number  # evaluations and the like go first

        self.waiting = sorted([*self.waiting, *begin], key=place)
        self.announce_all()
        return list(ended.values())

    def deal_to(self, live: Sequence[int]) -> None:
        """Deal later batches to these replicas, of which one has joined."""
        self._live_after = [live] if len(live) < self._replicas else []


def _numbered(batch: int, request: Request) -> Request:
    return replace(request, number=batch * BATCH + request.number)
