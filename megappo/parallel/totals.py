"""Sums and maxima over the ranks of the world, of figures that each rank has of its own samples.

A process without a world has the totals already: library users and tests need no process group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def place_in_world() -> tuple[int, int]:
    """(rank, world size); (0, 1) without a world."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def total(values: Tensor) -> Tensor:
    """Sum over ranks, element by element. Collective over the world; the same shape and type on every rank."""
    return _reduced(values, dist.ReduceOp.SUM)


def largest(values: Tensor) -> Tensor:
    """Maximum over ranks, element by element. Collective as `total`."""
    return _reduced(values, dist.ReduceOp.MAX)


def _reduced(values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if place_in_world()[1] == 1:
        return values
    result = values.clone()
    dist.all_reduce(result, op=operation)
    return result


def totals(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`total` of several fp64 vectors in one exchange. The same names and sizes on every rank."""
    return _together(named, total)


def maxima(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`largest` of several fp64 vectors in one exchange. The same names and sizes on every rank."""
    return _together(named, largest)


def _together(named: Mapping[str, Tensor], reduce: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    if not named:
        return {}
    sizes = [values.numel() for values in named.values()]
    parts = reduce(torch.cat([values.double().flatten() for values in named.values()])).split(sizes)
    return {name: part.view(values.shape) for part, (name, values) in zip(parts, named.items())}


def names_of_ranks(names: Sequence[str]) -> list[str]:
    """Names of all ranks: the own ones if all have the same, else all of them, sorted.

    Collective over the world: strings are exchanged only if the ranks differ.
    """
    own = list(names)
    digest = int.from_bytes(hashlib.blake2b(repr(own).encode(), digest_size=7).digest(), "big")
    extremes = largest(torch.tensor([digest, -digest]))
    if extremes[0] == -extremes[1]:
        return own
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, own)
    return sorted({name for theirs in found for name in theirs})


def first_of_ranks(text: str | None) -> str:
    """Text of the first rank that has one; one does. Collective over the world, for messages of failures."""
    said: list[str | None] = [text]
    if place_in_world()[1] > 1:
        said = [None] * dist.get_world_size()
        dist.all_gather_object(said, text)
    return next(one for one in said if one is not None)
