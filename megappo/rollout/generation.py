"""Generation of one batch: the replicas of an engine share its requests, and each rank gets the responses that it answers for. Each
replica starts with its own share. Requests that do not fit wait, the longest predicted first; replicas take them through one
counter in the world's store, so a slow replica takes fewer. Seeds belong to samples: responses do not depend on their replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist

from megappo.parallel.device import ranks_of_run
from megappo.parallel.meeting import RankIsLate
from megappo.rollout.half import RolloutHalf
from megappo.rollout.types import Replica, Request, Response, RolloutEngine, SamplingParams


class Deal(NamedTuple):
    """Request numbers: `own` is this replica's first share, `shared` the waiting requests in the order in which replicas take
    them."""

    own: Sequence[int]
    shared: Sequence[int]


def deal(count: int, replicas: int, index: int, size: int | None, predicted: Sequence[float] | None = None) -> Deal:
    """Deal requests 0..count-1 to replicas that each run `size` at once (None: any number); this one is number `index`. predicted:
    length of every response, in any unit; if requests must wait, the longest start first (Graham's LPT rule, SIAM J. Appl. Math.
    17, 1969). None keeps the batch's order, so that samples of one prompt stay together and share their cached prefix."""
    if replicas == 1 or size is None or count <= replicas * size:
        # All start at once, or in the only engine's own order: predictions from past steps must not change the numbers of a run.
        return Deal(range(index * count // replicas, (index + 1) * count // replicas), range(0))
    first = replicas * size
    if predicted is None:
        return Deal(range(index * size, (index + 1) * size), range(first, count))
    order = numpy.argsort(-numpy.asarray(predicted, numpy.float64), kind="stable")
    # Every second row is reversed (snake order), so that the replicas' sums are about equal.
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
    batch: str = "",
) -> list[Response]:
    """Answer a batch; return the responses that this rank answers for, by number (none where the engine does not live). Collective
    over the engine's ranks.

    requests: the whole batch, of equal length on all ranks; `requests[i]` has number i and is read only on the replica that takes
    it. on_finished: called inside `serving` with responses as they finish; it must not block. predicted: see `deal`; equal on all
    ranks. ValueError, on the ranks that took it, for a request that the engine cannot answer. RankIsLate if a rank is missing at
    the start or the end. batch: its name in an asynchronous run, whose rollout half has begun it.
    """
    if isinstance(engine, RolloutHalf):
        responses = engine.take(batch)
        if on_finished is not None:
            on_finished(responses)
        return responses
    replica = engine.replica
    if replica is None:
        return []
    responses: list[Response] = []
    with engine.serving():
        waiting = _Waiting(len(requests), replica, predicted)
        # A late rank is waited for here: within the engine's own exchanges the time limit is short.
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
        # No rank may count for the next batch while another still counts for this one. A replica that failed is noticed here.
        engine.meet("the end of generation")
    return sorted(responses, key=lambda response: response.number)


class _Waiting:
    """Requests that nobody has taken yet, as far as this replica knows; false once there are none."""

    def __init__(self, count: int, replica: Replica, predicted: Sequence[float] | None = None) -> None:
        self._replica = replica
        self._own, self._shared = deal(count, replica.count, replica.index, replica.max_running, predicted)
        self._exhausted = not self._shared
        if self._shared and replica.index == 0 and replica.is_leader:
            self._store.set("taken", "0")  # the meeting before generation is between this and the first count

    def __bool__(self) -> bool:
        return bool(self._own) or not self._exhausted

    def take(self, num: int) -> Sequence[int]:
        """Take up to `num` requests and return their numbers. All ranks of the replica call it, or none."""
        # No communication: a batch that fits into the running replicas is dealt out whole
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
        """Count `num` more requests as taken; return the count over all replicas."""
        count = self._store.add("taken", num) if self._replica.is_leader else 0
        return told_by_leader(count, self._replica.group, "to take requests for their replica")


def told_by_leader(count: int, group: dist.ProcessGroup | None, what: str) -> int:
    """Return the number of a replica's first rank on all its ranks, in whose world the caller is. RankIsLate, with `what` it was
    waited for to do, if the exchange fails."""
    if group is None:
        return count
    box = torch.tensor([count])
    try:
        dist.broadcast(box, group_src=0, group=group)
    except RuntimeError as error:
        ranks = ranks_of_run(group)
        raise RankIsLate(f"rank {ranks[group.rank()]} waited for rank {ranks[0]} {what}: {error}") from error
    return int(box)
