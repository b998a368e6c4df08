"""Execute a transfer plan: pack -> all_to_all -> land, bucket by bucket.

Reads the trainer's parameters in any float dtype, sends the engine's dtype, and passes rectangles to a receiver that writes them
into an engine. gloo for CPU tensors, NCCL for CUDA tensors; nothing else differs. Rectangles that stay on their rank are passed
as views of the parameters, without a buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.bridge.destination import Land, rectangle
from megappo.bridge.plan import Move

Tensors = Mapping[str, Tensor]


class Round(NamedTuple):
    """One bucket as seen by one rank. outgoing[d] and incoming[s] list moves in plan order, the same at both ends."""

    outgoing: tuple[tuple[Move, ...], ...]
    incoming: tuple[tuple[Move, ...], ...]
    local: tuple[Move, ...]
    on_wire: bool  # True if any rank sends anything; then all ranks take part in the collective

    @classmethod
    def of(cls, bucket: Sequence[Move], rank: int, world_size: int) -> Round:
        out: list[list[Move]] = [[] for _ in range(world_size)]
        into: list[list[Move]] = [[] for _ in range(world_size)]
        local = []
        for move in bucket:
            if move.src == move.dst == rank:
                local.append(move)
            elif move.src == rank:
                out[move.dst].append(move)
            elif move.dst == rank:
                into[move.src].append(move)
        on_wire = any(move.src != move.dst for move in bucket)
        return cls(tuple(map(tuple, out)), tuple(map(tuple, into)), tuple(local), on_wire)


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


def transfer(
    rounds: Sequence[Round],
    tensors: Tensors,
    land: Land,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> Traffic:
    """Run all rounds. Collective. At most two rounds are in memory.

    tensors: this rank's parameters by local name. land(move, [rows, cols]): takes one rectangle and must copy it before it returns.
    """
    sent = received = local = 0
    flying: _InFlight | None = None
    for current in rounds:
        started = _start(current, tensors, dtype, device, group)  # packs while the previous round is on the wire
        if flying is not None:
            _finish(flying, tensors, land)
        flying = started
        sent += started.packed.nbytes
        received += started.buffer.nbytes
        local += _numel(current.local) * dtype.itemsize
    if flying is not None:
        _finish(flying, tensors, land)
    return Traffic(sent, received, local)


def _numel(moves: Iterable[Move]) -> int:
    return sum(move.numel for move in moves)


def _source_view(move: Move, tensors: Tensors) -> Tensor:
    return rectangle(tensors[move.source].detach(), move.s_slot, move.s_row, move.s_col, move.rows, move.cols)


def _start(
    current: Round, tensors: Tensors, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None
) -> _InFlight:
    send_counts = [_numel(moves) for moves in current.outgoing]
    receive_counts = [_numel(moves) for moves in current.incoming]
    packed = torch.empty(sum(send_counts), dtype=dtype, device=device)
    buffer = torch.empty(sum(receive_counts), dtype=dtype, device=device)
    offset = 0
    for moves in current.outgoing:
        for move in moves:
            packed[offset : offset + move.numel].view(move.rows, move.cols).copy_(_source_view(move, tensors))
            offset += move.numel
    work = None
    if current.on_wire:  # as bytes, which every backend carries
        work = dist.all_to_all_single(
            buffer.view(torch.uint8),
            packed.view(torch.uint8),
            [n * dtype.itemsize for n in receive_counts],
            [n * dtype.itemsize for n in send_counts],
            group=group,
            async_op=True,
        )
    return _InFlight(current, buffer, packed, work)


def _finish(flying: _InFlight, tensors: Tensors, land: Land) -> None:
    for move in flying.round.local:  # while the wire is busy
        land(move, _source_view(move, tensors))
    if flying.work is not None:
        flying.work.wait()
    offset = 0
    for moves in flying.round.incoming:
        for move in moves:
            land(move, flying.buffer[offset : offset + move.numel].view(move.rows, move.cols))
            offset += move.numel
