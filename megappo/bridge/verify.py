"""Verification of every push: senders and receivers checksum the engine's parameters independently (`checksum.py`). Senders sum
their rectangles, receivers whole parameters in loader format, padding included. It detects neither a plan that names the wrong
tensor nor changes by vLLM's kernels afterwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.bridge.checksum import block_bytes, rectangle_sum
from megappo.bridge.destination import Destination, Move
from megappo.bridge.plan import Ends, RankPlan
from megappo.bridge.target import Parameter
from megappo.bridge.transfer import source_part
from megappo.bridge.wire import Wire
from megappo.models.lora import Weights


class Checksums:
    """Checksums of the parameters of all engine ranks, push after push; each rank handles its own moves only. destination: of this
    rank; None if it hosts no engine."""

    def __init__(self, ends: Ends, plan: RankPlan, destination: Destination | None, wire: Wire) -> None:
        self._wire = wire
        places = [ends.parameters(tp_rank) for tp_rank in range(len(ends.targets))]
        tp_rank_of = {dst: position % len(places) for position, dst in enumerate(ends.destinations)}
        local = [move for move in plan.incoming if move.src == wire.rank]
        # A checksum travels for each parameter and pair of ranks. Both ends meet the parameters of a pair in the same order.
        sent: dict[int, dict[str, int]] = {peer: {} for peer in wire.peers}
        received: dict[int, dict[str, int]] = {peer: {} for peer in wire.peers}
        for move in sorted([*plan.outgoing, *local], key=lambda move: move.step):
            sent[move.dst].setdefault(move.target, len(sent[move.dst]))
        for move in plan.incoming:
            received[move.src].setdefault(move.target, len(received[move.src]))
        self._sent_counts = [len(sent[peer]) for peer in wire.peers]
        self._received_counts = [len(received[peer]) for peer in wire.peers]
        begins = dict(zip(wire.peers, accumulate(self._sent_counts, initial=0)))
        # Replicas of the engine are sent the same rectangles, which are summed once.
        parts: dict[tuple, list[int]] = defaultdict(list)
        self._parts: list[tuple[Move, Parameter]] = []
        for move in (*plan.outgoing, *local):
            key = tp_rank_of[move.dst], *move[3:]
            if key not in parts:
                self._parts.append((move, places[key[0]][move.target]))
            parts[key].append(begins[move.dst] + sent[move.dst][move.target])
        entries = [(part, entry) for part, of_part in enumerate(parts.values()) for entry in of_part]
        self._part_of, self._entry_of = _columns(entries, wire.device)
        self._parameters: dict[str, Parameter] = {}
        self._constants: Tensor | None = None
        self._arrived: dict[str, Tensor] = {}
        if destination is not None:
            mine = places[tp_rank_of[wire.rank]]
            self._parameters = dict(mine)
            for name, shape in destination.shapes.items():
                if name not in mine:  # all padding
                    dtype = destination.dtype_of(name)
                    self._parameters[name] = Parameter(name, shape, dtype, block_bytes(dtype.itemsize, [shape.cols]))
            self._constants = self._sum_of_fills(destination)
        index = {name: number for number, name in enumerate(self._parameters)}
        pairs = [(index[name], 0) for peer in wire.peers for name in received[peer]]
        self._parameter_of, _ = _columns(pairs, wire.device)

    def _sum_of_fills(self, destination: Destination) -> Tensor:
        """Sum the constants in this rank's parameters, which no sender has: [parameters]."""
        sums = dict.fromkeys(self._parameters, torch.zeros((), dtype=torch.int64))
        for fill in destination.fills:
            _, shape, dtype, block = self._parameters[fill.target]
            # On the host: a fill is a few rows of padding.
            values = torch.full((fill.box.rows, fill.box.cols), fill.value, dtype=dtype)
            row = fill.slot * shape.rows + fill.box.r0
            sums[fill.target] = sums[fill.target] + rectangle_sum(values, block, row, fill.box.c0)
        return torch.stack(list(sums.values())).to(self._wire.device)

    def read_sources(self, tensors: Weights) -> Tensor:
        """Sum this rank's contributions to the engine's parameters, by peer and parameter; call it before the parameters can
        change."""
        sums = torch.zeros(sum(self._sent_counts), dtype=torch.int64, device=self._wire.device)
        if self._parts:
            found = [
                rectangle_sum(source_part(move, tensors), block, move.d_slot * shape.rows + move.d_row, move.d_col, dtype)
                for move, (_, shape, dtype, block) in self._parts
            ]
            of_parts = torch.stack(found).to(self._wire.device)
            sums.index_add_(0, self._entry_of, of_parts[self._part_of])  # wraps modulo 2^64
        self._arrived = {}
        return sums

    def inspect(self, name: str, tensor: Tensor) -> None:
        """Record the checksum of a finished parameter of this rank, in loader format."""
        _, shape, dtype, block = self._parameters[name]
        self._arrived[name] = rectangle_sum(tensor.detach().reshape(-1, shape.cols), block, dtype=dtype)

    def mismatches(self, sums: Tensor) -> list[str]:
        """Return one line per parameter of this rank that differs from the senders'. sums: from `read_sources` at this push.
        Collective."""
        told = torch.empty(sum(self._received_counts), dtype=torch.int64, device=self._wire.device)
        dist.all_to_all_single(told, sums, self._received_counts, self._sent_counts, group=self._wire.group)
        if self._constants is None:
            return []
        expected = self._constants.clone().index_add_(0, self._parameter_of, told).tolist()
        found = torch.stack(list(self._arrived.values())).tolist() if self._arrived else []
        arrived = dict(zip(self._arrived, found))
        lines = []
        for name, want in zip(self._parameters, expected):
            got = arrived.get(name)
            if got != want:
                seen = "never arrived" if got is None else f"arrived with checksum {got & (1 << 64) - 1:#018x}"
                lines.append(f"rank {self._wire.rank}: {name} {seen}, the senders hold {want & (1 << 64) - 1:#018x}")
        return lines


def _columns(pairs: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    first, second = torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
    return first, second
