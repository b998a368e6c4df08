"""Executes a transfer plan: pack -> all_to_all -> land, round by round. Reads the trainer's parameters in any float dtype and sends
the engine's. gloo carries CPU tensors, NCCL CUDA tensors; rectangles that stay on their rank are passed as views."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.bridge.destination import Land
from megappo.bridge.move import Move
from megappo.bridge.rounds import Round
from megappo.bridge.wire import Wire
from megappo.models.lora import Weights, part_of


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


def transfer(rounds: Sequence[Round], tensors: Weights, land: Land, dtype: torch.dtype, wire: Wire) -> Traffic:
    """Run all rounds, at most two of them in memory. Collective. tensors: this rank's parameters by local name. land(move, [rows,
    cols]): takes one rectangle and must copy it before it returns."""
    sent = received = local = 0
    flying: _InFlight | None = None
    for current in rounds:
        started = _start(current, tensors, dtype, wire)  # packs while the previous round is on the wire
        if flying is not None:
            _finish(flying, tensors, land, wire)
        flying = started
        sent += started.packed.nbytes
        received += started.buffer.nbytes
        local += _numel(current.local) * dtype.itemsize
    if flying is not None:
        _finish(flying, tensors, land, wire)
    return Traffic(sent, received, local)


def _numel(moves: Iterable[Move]) -> int:
    return sum(move.numel for move in moves)


def source_part(move: Move, tensors: Weights) -> Tensor:
    """Return [rows, cols] of a move in this rank's parameters: a view in their dtype, or fp32 values with an adapter added."""
    return part_of(tensors[move.source], move.s_slot, move.s_row, move.s_col, move.rows, move.cols)


def _start(current: Round, tensors: Weights, dtype: torch.dtype, wire: Wire) -> _InFlight:
    send_counts = [_numel(current.outgoing.get(peer, ())) for peer in wire.peers]
    receive_counts = [_numel(current.incoming.get(peer, ())) for peer in wire.peers]
    packed = torch.empty(sum(send_counts), dtype=dtype, device=wire.device)
    buffer = torch.empty(sum(receive_counts), dtype=dtype, device=wire.device)
    offset = 0
    for move in _in_order(current.outgoing, wire):
        packed[offset : offset + move.numel].view(move.rows, move.cols).copy_(source_part(move, tensors))
        offset += move.numel
    work = None
    if current.on_wire:  # as bytes, which every backend carries
        work = dist.all_to_all_single(
            buffer.view(torch.uint8),
            packed.view(torch.uint8),
            [n * dtype.itemsize for n in receive_counts],
            [n * dtype.itemsize for n in send_counts],
            group=wire.group,
            async_op=True,
        )
    return _InFlight(current, buffer, packed, work)


def _finish(flying: _InFlight, tensors: Weights, land: Land, wire: Wire) -> None:
    for move in flying.round.local:  # while the wire is busy
        land(move, source_part(move, tensors))
    if flying.work is not None:
        flying.work.wait()
    offset = 0
    for move in _in_order(flying.round.incoming, wire):
        land(move, flying.buffer[offset : offset + move.numel].view(move.rows, move.cols))
        offset += move.numel


def _in_order(moves: Mapping[int, Sequence[Move]], wire: Wire) -> Iterable[Move]:
    # The order in which the wire lays out a buffer
    return (move for peer in wire.peers for move in moves.get(peer, ()))
