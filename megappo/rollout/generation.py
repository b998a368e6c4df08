"""Generation of a batch: the replicas of an engine share its requests, and every rank gets the responses that it answers for.

Each replica starts with a share of its own. What does not fit into the running batches waits, and a replica takes some whenever one
of its requests is answered, by one counter in the world's store: a slow replica takes fewer, and those that are expected to be the
longest are taken first. Seeds belong to samples, so the responses do not depend on who takes what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist

from megappo.parallel.device import ranks_of_run
from megappo.parallel.meeting import RankIsLate
from megappo.rollout.types import Replica, Request, Response, RolloutEngine, SamplingParams


class Deal(NamedTuple):
    """Numbers of requests. own: of this replica, which it starts with. shared: of all, in the order in which they are taken."""

    own: Sequence[int]
    shared: Sequence[int]


def deal(count: int, replicas: int, index: int, size: int | None, predicted: Sequence[float] | None = None) -> Deal:
    """Deal requests 0..count-1 to replicas that each run `size` at once (None: any number); this one is number `index`.

    predicted: length of the response to every request, in any unit. It is used if requests have to wait: the longest begin first,
    as Graham's rule has it (SIAM J. Appl. Math. 17, 1969), because a long one that begins last is what all others wait for. Without
    it the batch's order stays, so that samples of one prompt are taken together and share their cached prefix.
    """
    if replicas == 1 or size is None or count <= replicas * size:
        # All begin at once, or in the only engine's own order: what the numbers of a run depend on does not depend on a history.
        return Deal(range(index * count // replicas, (index + 1) * count // replicas), range(0))
    first = replicas * size
    if predicted is None:
        return Deal(range(index * size, (index + 1) * size), range(first, count))
    order = numpy.argsort(-numpy.asarray(predicted, numpy.float64), kind="stable")
    # Back and forth: each row of requests is dealt in the other direction than the one before, so that sums are about equal.
    rows = order[:first].reshape(size, replicas)
    rows[1::2] = rows[1::2, ::-1]
    return Deal(rows[:, index].tolist(), order[first:].tolist())


OnFinished = Callable[[list[Response]], None]


def generate(
    engine: RolloutEngine,
    requests: Sequence[Request],
    sampling: SamplingParams,
    on_finished: OnFinished | None = None,
    predicted: Sequence[float] | None = None,
) -> list[Response]:
    """Answer a batch; returns the responses that this rank answers for, by number: none where the engine does not live. Collective
    over the engine's ranks.

    requests: the whole batch, of the same length on all ranks; `requests[i]`, of number i, is read only on the ranks of the replica
    that takes it. on_finished: called with responses of this rank as they finish, inside `RolloutEngine.serving`: let it start work
    elsewhere. predicted: length of each response, the same on all ranks; see `dealing.py`. ValueError, on the ranks that took it,
    for a request that the engine cannot answer. RankIsLate if a rank does not come, before the first request or after the last.
    """
    replica = engine.replica
    if replica is None:
        return []
    responses: list[Response] = []
    with engine.serving():
        waiting = _Waiting(len(requests), replica, predicted)
        # The ranks of a replica would count the time of one that comes late within the engine's exchanges, whose limit is short.
        engine.meet("generation")
        while waiting or engine.num_unfinished:
            # Equal on all ranks of the replica, so that they take and submit before the same step.
            free = len(requests) if replica.max_running is None else replica.max_running - engine.num_running
            if waiting and free > 0 and (taken := waiting.take(free)):
                engine.submit([requests[number] for number in taken], sampling)
            if engine.num_unfinished and (finished := engine.poll()):
                responses += finished
                if on_finished is not None:
                    on_finished(finished)
        # Nobody counts for the next batch while another still counts for this one; and a replica that failed is missed here.
        engine.meet("the end of generation")
    return sorted(responses, key=lambda response: response.number)


class _Waiting:
    """Requests that were not taken yet, as far as this replica knows; false once there are none.

    Its own share comes first, without communication: the whole batch is dealt out if it fits into what the replicas run at once.
    """

    def __init__(self, count: int, replica: Replica, predicted: Sequence[float] | None = None) -> None:
        self._replica = replica
        self._own, self._shared = deal(count, replica.count, replica.index, replica.max_running, predicted)
        self._exhausted = not self._shared
        if self._shared and replica.index == 0 and replica.is_leader:
            self._store.set("taken", "0")  # the meeting before generation is between this and the first count

    def __bool__(self) -> bool:
        return bool(self._own) or not self._exhausted

    def take(self, num: int) -> Sequence[int]:
        """Take up to `num` requests; their numbers. Called by all ranks of the replica or by none."""
        if self._own:
            taken, self._own = self._own[:num], self._own[num:]
            return taken
        end = self._counted(num)
        self._exhausted = end >= len(self._shared)
        return self._shared[end - num : end]

    @property
    def _store(self) -> dist.Store:
        return dist.PrefixStore("megappo.generation", dist.distributed_c10d._get_default_store())

    def _counted(self, num: int) -> int:
        """Count `num` more as taken; the count of all replicas so far."""
        group = self._replica.group
        count = self._store.add("taken", num) if self._replica.is_leader else 0
        if group is None:
            return count
        box = torch.tensor([count])
        try:
            dist.broadcast(box, group_src=0, group=group)
        except RuntimeError as error:
            ranks = ranks_of_run(group)
            raise RankIsLate(
                f"rank {ranks[group.rank()]} waited for rank {ranks[0]} to take requests for their replica: {error}"
            ) from error
        return int(box)
