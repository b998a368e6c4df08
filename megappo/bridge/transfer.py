"""Executes a transfer plan: pack -> all_to_all -> land, round by round. A rank knows its own moves only, so all agree on where
the rounds end and that senders and receivers planned the same. Reads the trainer's parameters in any float dtype and sends them
in the engine's. gloo carries CPU tensors, NCCL CUDA tensors; rectangles that stay on their rank are passed as views."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.bridge.destination import Land, Move
from megappo.bridge.plan import RankPlan
from megappo.bridge.wire import Wire
from megappo.models.lora import Weights, part_of


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


def agree_rounds(plan: RankPlan, cap_bytes: int, wire: Wire) -> list[Round]:
    """Cut the steps into rounds; per round no rank moves more than `cap_bytes` over the wire in either direction, unless a single
    step is larger. Collective: one integer for each round."""
    remote = [move for move in plan.incoming if move.src != wire.rank]
    loads = [list(accumulate(_bytes_by_step(moves, plan.steps), initial=0)) for moves in (plan.outgoing, remote)]
    ends = [0]
    while ends[-1] < plan.steps:
        start = ends[-1]
        # As many steps as fit on this rank, at least one; then the smallest number over all ranks.
        fit = min(bisect_right(load, load[start] + cap_bytes) - 1 for load in loads)
        ends += wire.reduce([max(fit, start + 1)], dist.ReduceOp.MIN)
    spans = list(zip(ends, ends[1:]))
    busy = wire.reduce([int(any(load[end] > load[start] for load in loads)) for start, end in spans], dist.ReduceOp.MAX)
    return [_round(plan, wire.rank, start, end, bool(on_wire)) for (start, end), on_wire in zip(spans, busy)]


def _bytes_by_step(moves: Iterable[Move], steps: int) -> list[int]:
    load = [0] * steps
    for move in moves:
        load[move.step] += move.num_bytes
    return load


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


class Traffic(NamedTuple):
    """Bytes of a transfer as one rank saw them."""

    sent: int
    received: int
    local: int


class _InFlight(NamedTuple):
    round: Round
    buffer: Tensor
    packed: Tensor  # kept until the wire is done with it
    work: dist.Work | None


def transfer(rounds: Sequence[Round], tensors: Weights, land: Land, wire: Wire) -> Traffic:
    """Run all rounds, at most two of them in memory. Collective. tensors: this rank's parameters by local name. land(move, [rows,
    cols]): takes one rectangle and must copy it before it returns."""
    sent = received = local = 0
    flying: _InFlight | None = None
    for current in rounds:
        started = _start(current, tensors, wire)  # packs while the previous round is on the wire
        if flying is not None:
            _finish(flying, tensors, land, wire)
        flying = started
        sent += started.packed.nbytes
        received += started.buffer.nbytes
        local += _bytes(current.local)
    if flying is not None:
        _finish(flying, tensors, land, wire)
    return Traffic(sent, received, local)


def _bytes(moves: Iterable[Move]) -> int:
    return sum(move.num_bytes for move in moves)


def source_part(move: Move, tensors: Weights) -> Tensor:
    """Return [rows, cols] of a move in this rank's parameters: a view in their dtype, or fp32 values with an adapter added."""
    part = part_of(tensors[move.source], move.s_slot, move.s_row, move.s_col, *move.source_size)
    return part.t() if move.turned else part


def _start(current: Round, tensors: Weights, wire: Wire) -> _InFlight:
    send_counts = [_bytes(current.outgoing.get(peer, ())) for peer in wire.peers]
    receive_counts = [_bytes(current.incoming.get(peer, ())) for peer in wire.peers]
    # As bytes, which every backend carries
    packed = torch.empty(sum(send_counts), dtype=torch.uint8, device=wire.device)
    buffer = torch.empty(sum(receive_counts), dtype=torch.uint8, device=wire.device)
    for move, part in _parts(packed, current.outgoing, wire):
        part.copy_(source_part(move, tensors))
    work = None
    if current.on_wire:
        work = dist.all_to_all_single(buffer, packed, receive_counts, send_counts, group=wire.group, async_op=True)
    return _InFlight(current, buffer, packed, work)


def _finish(flying: _InFlight, tensors: Weights, land: Land, wire: Wire) -> None:
    for move in flying.round.local:  # while the wire is busy
        land(move, source_part(move, tensors))
    if flying.work is not None:
        flying.work.wait()
    for move, part in _parts(flying.buffer, flying.round.incoming, wire):
        land(move, part)


def _parts(buffer: Tensor, moves: Mapping[int, Sequence[Move]], wire: Wire) -> Iterator[tuple[Move, Tensor]]:
    """Yield every move with its [rows, cols] of a buffer, in the order in which the wire lays it out."""
    offset = 0
    for move in (move for peer in wire.peers for move in moves.get(peer, ())):
        size = move.numel * move.dtype.itemsize
        yield move, buffer[offset : offset + size].view(move.dtype).view(move.rows, move.cols)
        offset += move.num_bytes
