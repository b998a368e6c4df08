"""Rounds of a push: the moves that are in memory at the same time. A rank knows its own moves only, so all ranks agree on where the
rounds end and that senders and receivers planned the same."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

import torch.distributed as dist

from megappo.bridge.move import Move
from megappo.bridge.plan import RankPlan
from megappo.bridge.wire import Wire


class Round(NamedTuple):
    """Consecutive steps as one rank sees them. outgoing[d], incoming[s]: moves to and from a peer, in the same order at both
    ends."""

    outgoing: Mapping[int, Sequence[Move]]
    incoming: Mapping[int, Sequence[Move]]
    local: Sequence[Move]
    on_wire: bool  # True if any rank sends anything; then all ranks take part in the collective


def disagreements(plan: RankPlan, wire: Wire) -> list[str]:
    """Return one line for each rank that would send this one other moves than it expects. Collective."""
    theirs = wire.swap(plan.sent)
    return [
        f"rank {peer} would send rank {wire.rank} other weights than it expects"
        for peer, proof in theirs.items()
        if proof != plan.received.get(peer, 0)
    ]


def agree_rounds(plan: RankPlan, itemsize: int, cap_bytes: int, wire: Wire) -> list[Round]:
    """Cut the steps into rounds; per round no rank moves more than `cap_bytes` over the wire in either direction, unless a single
    step is larger. Collective: one integer for each round."""
    remote = [move for move in plan.incoming if move.src != wire.rank]
    loads = [list(accumulate(_bytes_by_step(moves, plan.steps, itemsize), initial=0)) for moves in (plan.outgoing, remote)]
    ends = [0]
    while ends[-1] < plan.steps:
        start = ends[-1]
        # As many steps as fit on this rank, at least one; then the smallest number over all ranks.
        fit = min(bisect_right(load, load[start] + cap_bytes) - 1 for load in loads)
        ends += wire.reduce([max(fit, start + 1)], dist.ReduceOp.MIN)
    spans = list(zip(ends, ends[1:]))
    busy = wire.reduce([int(any(load[end] > load[start] for load in loads)) for start, end in spans], dist.ReduceOp.MAX)
    return [_round(plan, wire.rank, start, end, bool(on_wire)) for (start, end), on_wire in zip(spans, busy)]


def _bytes_by_step(moves: Iterable[Move], steps: int, itemsize: int) -> list[int]:
    load = [0] * steps
    for move in moves:
        load[move.step] += move.rows * move.cols
    return [numel * itemsize for numel in load]


def _round(plan: RankPlan, rank: int, start: int, end: int, on_wire: bool) -> Round:
    outgoing: dict[int, list[Move]] = defaultdict(list)
    incoming: dict[int, list[Move]] = defaultdict(list)
    for move in _between(plan.outgoing, start, end):
        outgoing[move.dst].append(move)
    for move in _between(plan.incoming, start, end):
        incoming[move.src].append(move)
    local = incoming.pop(rank, [])
    return Round(dict(outgoing), dict(incoming), local, on_wire)


def _between(moves: Sequence[Move], start: int, end: int) -> Sequence[Move]:
    # The moves are sorted by step
    step = attrgetter("step")
    return moves[bisect_left(moves, start, key=step) : bisect_left(moves, end, key=step)]
