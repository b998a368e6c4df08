"""Verification of a transfer: a checksum that senders and receivers compute independently.

For one destination parameter the checksum is  sum_i bits(x_i) * w(i)  mod 2^64, where i is the element's flat index in the
destination parameter and w(i) an odd hash of it. The sum is additive: each sender contributes its rectangles, and the receiver
sums the whole parameter in loader format, padding included. It does not detect a plan that names the wrong tensor (the plan
proves its coverage itself), nor changes by vLLM's kernels afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.bridge.destination import Destination, Shape, rectangle
from megappo.bridge.plan import Move

_BITS = {2: torch.int16, 4: torch.int32}
_CHUNK = 1 << 21  # elements at once: the int64 temporaries of one chunk stay below 64 MiB


def _index_weight(index: Tensor) -> Tensor:
    """Odd 64-bit hash of int64 indices (multiply, xor-shift, multiply); int64 products wrap modulo 2^64."""
    # The multipliers of splitmix64 (2^64 / golden ratio, and of its mixer) as signed integers.
    mixed = index * -7046029254386353131
    mixed = (mixed ^ (mixed >> 31)) * -4658895280553007687
    return mixed | 1  # odd, so invertible modulo 2^64: no single changed element keeps the sum


def rectangle_sum(values: Tensor, base: int, stride: int) -> int:
    """Signed 64-bit contribution of [rows, cols] `values` with element (r, c) at flat index base + r * stride + c."""
    rows, cols = values.shape
    columns = torch.arange(cols, device=values.device)
    step = max(1, _CHUNK // max(cols, 1))
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for r0 in range(0, rows, step):
        part = values[r0 : r0 + step].contiguous()  # `view` below needs it
        starts = base + (r0 + torch.arange(part.shape[0], device=values.device)) * stride
        bits = part.view(_BITS[part.element_size()]).long()
        total += (bits * _index_weight(starts[:, None] + columns)).sum()
    return int(total)


def _wrap(value: int) -> int:
    """Reduce a Python integer modulo 2^64 to a signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


class ChecksumRound:
    """Checksums of one push: senders `add_moves`, receivers `inspect` finished parameters, `mismatches` compares.

    destinations: of every rank of the group. The order of the entries is the same on all ranks.
    """

    def __init__(self, destinations: Mapping[int, Destination], rank: int) -> None:
        self._destinations = destinations
        self._rank = rank
        names = [(dst, name) for dst in sorted(destinations) for name in destinations[dst].shapes]
        self._entry = {key: i for i, key in enumerate(names)}
        self._sent = [0] * len(names)  # by entry; Python integers, reduced modulo 2^64 when they are exchanged
        self._received: dict[str, int] = {}

    def add_moves(self, moves: Iterable[Move], tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Add the rectangles that this rank sends, read from its own parameters and rounded to `dtype`."""
        for move in moves:
            shape = self._destinations[move.dst].shapes[move.target]
            values = rectangle(tensors[move.source].detach(), move.s_slot, move.s_row, move.s_col, move.rows, move.cols)
            base = shape.flat_index(move.d_slot, move.d_row, move.d_col)
            self._sent[self._entry[move.dst, move.target]] += rectangle_sum(values.to(dtype), base, shape.cols)

    def inspect(self, name: str, tensor: Tensor) -> None:
        """Record the checksum of a finished parameter of this rank, in loader format."""
        shape = Shape.of(tensor.shape)
        self._received[name] = rectangle_sum(tensor.detach().reshape(-1, shape.cols), 0, shape.cols)

    def _fill_sums(self) -> dict[str, int]:
        """Contributions of the constants in this rank's parameters, which no sender has."""
        destination = self._destinations[self._rank]
        sums: dict[str, int] = {}
        for fill in destination.fills:
            shape = destination.shapes[fill.target]
            # On the host: a fill is a few rows of padding.
            values = torch.full((fill.box.rows, fill.box.cols), fill.value, dtype=destination.dtype)
            base = shape.flat_index(fill.slot, fill.box.r0, fill.box.c0)
            sums[fill.target] = sums.get(fill.target, 0) + rectangle_sum(values, base, shape.cols)
        return sums

    def mismatches(self, device: torch.device, group: dist.ProcessGroup | None) -> list[str]:
        """One line per parameter of this rank that differs from the senders'; empty if none does. Collective."""
        sent = torch.tensor([_wrap(value) for value in self._sent], dtype=torch.int64, device=device)
        dist.all_reduce(sent, group=group)  # int64 sums wrap modulo 2^64, as the checksum does
        expected = sent.tolist()
        fills = self._fill_sums()
        lines = []
        for name in self._destinations[self._rank].shapes:
            want = _wrap(expected[self._entry[self._rank, name]] + fills.get(name, 0))
            got = self._received.get(name)
            if got != want:
                seen = "never arrived" if got is None else f"arrived with checksum {got & (1 << 64) - 1:#018x}"
                lines.append(f"rank {self._rank}: {name} {seen}, the senders hold {want & (1 << 64) - 1:#018x}")
        return lines


def agree(lines: Sequence[str], group: dist.ProcessGroup | None) -> list[str]:
    """Gather the lines of all ranks, so that every rank raises or none. Collective."""
    gathered: list[list[str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, list(lines), group=group)
    return [line for part in gathered for line in part or []]
