"""Sums and maxima over the world's ranks of figures of each rank's own samples. Without a world, as in tests and library use, the
values are returned as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# gloo's ring takes 2 (ranks - 1) dependent steps, 2 ms of processor time for 8 ranks on 2 cores. All-to-all sends half the messages
# in one step: 0.25 ms.
MOST_BYTES_TO_ALL = 1 << 20


def place_in_world() -> tuple[int, int]:
    """Return (rank, world size); (0, 1) without a world."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def total(values: Tensor) -> Tensor:
    """Sum over ranks, element by element. Collective over the world; the same shape and type on every rank."""
    return _reduced(values, dist.ReduceOp.SUM)


def largest(values: Tensor) -> Tensor:
    """Take the maximum over ranks, element by element. Collective as `total`."""
    return _reduced(values, dist.ReduceOp.MAX)


def total_and_largest(sums: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """Return `total` of the first and `largest` of the second, fp64 vectors, in one exchange if they are small. Collective."""
    together = torch.cat([sums, maxima])
    if place_in_world()[1] == 1 or not _goes_to_all(together.nbytes, together.device):
        return total(sums), largest(maxima)
    of_sums, of_maxima = _of_ranks(together).split([len(sums), len(maxima)], 1)
    return _pairwise(of_sums, dist.ReduceOp.SUM), _pairwise(of_maxima, dist.ReduceOp.MAX)


def rows_of_ranks(rows: Tensor, expected: int = 0) -> Tensor:
    """Concatenate the [M, K] int32 rows of all ranks to [sum of M, K], rank by rank; M may differ. Collective over the world.
    expected: the same on every rank. If no rank has more rows, and these are few, one exchange carries counts and rows."""
    world_size, width = place_in_world()[1], rows.shape[1]
    if world_size == 1:
        return rows
    # Room that ranks leave empty costs less than a second exchange only if there is little of it.
    expected = expected if _goes_to_all((expected + 1) * width * rows.itemsize, rows.device) else 0
    mine = rows.new_zeros(expected + 1, width)
    mine[0, 0] = len(rows)
    mine[1 : len(rows) + 1] = rows[:expected]
    found = _of_ranks(mine.flatten() if expected else mine[0, :1]).view(world_size, expected + 1, -1)
    counts = found[:, 0, 0].long()
    if int(counts.max()) <= expected:
        return found[:, 1:][torch.arange(expected) < counts[:, None]]
    sizes = (counts * width).tolist()
    received = rows.new_empty(sum(sizes))
    dist.all_to_all_single(received, rows.flatten().repeat(world_size), sizes, [rows.numel()] * world_size)
    return received.view(-1, width)


def _reduced(values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if place_in_world()[1] == 1 or not values.numel():
        return values
    if _goes_to_all(values.nbytes, values.device):
        return _pairwise(_of_ranks(values.flatten()), operation).view(values.shape)
    result = values.clone()
    dist.all_reduce(result, op=operation)
    return result


def _goes_to_all(num_bytes: int, device: torch.device) -> bool:
    # Small enough that sending to every rank costs less than a ring's steps or a second exchange
    return device.type == "cpu" and num_bytes * place_in_world()[1] <= MOST_BYTES_TO_ALL


def _of_ranks(values: Tensor) -> Tensor:
    """Gather [world, n] from the [n] of each rank, in one exchange without dependent steps."""
    world_size = place_in_world()[1]
    received = values.new_empty(world_size, len(values))
    dist.all_to_all_single(received.view(-1), values.repeat(world_size))
    return received


def _pairwise(rows: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """Combine rows [R, n] to [n] by halving."""
    # Elementwise, so every rank gets the same bits whatever its processor
    combine = torch.add if operation == dist.ReduceOp.SUM else torch.maximum
    while len(rows) > 1:
        half = len(rows) // 2
        halved = combine(rows[:half], rows[half : 2 * half])
        rows = torch.cat([halved, rows[2 * half :]]) if len(rows) % 2 else halved
    return rows[0]


def totals(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `total` of several fp64 vectors in one exchange. Same names and sizes on every rank. Collective."""
    return _named(total(_flat(named)), named)


def maxima(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `largest` of several fp64 vectors in one exchange. Same names and sizes on every rank. Collective."""
    return _named(largest(_flat(named)), named)


def totals_and_maxima(sums: Mapping[str, Tensor], largest_of: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return `totals` of the first and `maxima` of the second, in one exchange. Collective."""
    summed, most = total_and_largest(_flat(sums), _flat(largest_of))
    return _named(summed, sums), _named(most, largest_of)


def _flat(named: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.float64), *(values.double().flatten() for values in named.values())])


def _named(flat: Tensor, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = flat.split([values.numel() for values in named.values()])
    return {name: part.view(values.shape) for part, (name, values) in zip(parts, named.items())}


def names_of_ranks(names: Sequence[str]) -> list[str]:
    """Return this rank's names if all ranks have the same, else all ranks' names, sorted. Collective over the world; strings are
    exchanged only if the ranks differ."""
    own = list(names)
    digest = int.from_bytes(hashlib.blake2b(repr(own).encode(), digest_size=7).digest(), "big")
    extremes = largest(torch.tensor([digest, -digest]))
    if extremes[0] == -extremes[1]:
        return own
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, own)
    return sorted({name for theirs in found for name in theirs})


def first_of_ranks(text: str | None) -> str:
    """Return the text of the first rank that has one; at least one must. Collective over the world, for messages of failures."""
    said: list[str | None] = [text]
    if place_in_world()[1] > 1:
        said = [None] * dist.get_world_size()
        dist.all_gather_object(said, text)
    return next(one for one in said if one is not None)
