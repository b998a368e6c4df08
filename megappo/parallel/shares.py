"""Division of a batch over the ranks of a role: one share per model replica, the ranks that hold it, and the sequences of each
share and micro-batch by their lengths. Pure values and functions, equal everywhere: ranks without the role send to it and receive
from it, and every rank that knows the lengths computes the same plan without communication."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from megappo.parallel.layout import ParallelLayout
from megappo.runtime.messages import name_ranks


def partition_balanced(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Partition indices into `num_parts` parts of nearly equal token count; ties by index."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for index, part in enumerate(parts_balanced(numpy.array(lengths, dtype=numpy.int64), num_parts).tolist()):
        parts[part].append(index)
    return parts


def parts_balanced(lengths: NDArray[numpy.int64], num_parts: int) -> NDArray[numpy.int64]:
    """Return the part of every index in `partition_balanced`: longest processing time first (Graham 1969), at most 4/3 of the
    optimal load. lengths, result: [N] int64."""
    order = numpy.argsort(-lengths, kind="stable")
    # A load and its part in one integer: the lower of two equal parts comes first.
    bits = (num_parts - 1).bit_length()
    heap, given = list(range(num_parts)), []
    for size in (lengths[order] << bits).tolist():
        given.append(heap[0])
        heapq.heapreplace(heap, heap[0] + size)
    found = numpy.empty_like(order)
    found[order] = numpy.array(given, dtype=numpy.int64) & ((1 << bits) - 1)
    return found


def split_by_budget(lengths: Sequence[int], token_budget: int) -> int:
    """Return the smallest number (at least 1) of balanced parts within the budget; a sequence longer than it is alone in a part."""
    total = sum(min(length, token_budget) for length in lengths)
    num_parts = max(1, -(-total // token_budget))  # lower bound: all parts full
    while num_parts < len(lengths) and not _fits(lengths, num_parts, token_budget):
        num_parts += 1
    return num_parts


def _fits(lengths: Sequence[int], num_parts: int, token_budget: int) -> bool:
    parts = partition_balanced(lengths, num_parts)
    return all(len(part) <= 1 or sum(lengths[i] for i in part) <= token_budget for part in parts)


def plan_micro_batches(lengths: Sequence[int], token_budget: int, least: int = 1) -> list[list[int]]:
    """Cut the sequences of one model replica into at least `least` micro-batches within the budget, some perhaps empty; return the
    indices of each, ascending."""
    return partition_balanced(lengths, max(least, split_by_budget(lengths, token_budget)))


@dataclass(frozen=True)
class Units:
    """Groups of neighbouring sequences that stay in one micro-batch. lengths: tokens of each. sizes: its sequences; empty if each
    is one sequence."""

    lengths: list[int]
    sizes: Sequence[int] = ()

    @classmethod
    def of(cls, lengths: Tensor, sizes: Sequence[int]) -> Units:
        """Group sequences by the sizes of their groups. lengths: [B] int64."""
        if not sizes:
            return cls(lengths.tolist())
        assert sum(sizes) == len(lengths), f"groups of {sum(sizes)} sequences, and there are {len(lengths)}"
        return cls([int(one.sum()) for one in lengths.split(list(sizes))], sizes)

    def sequences(self, parts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the sequences of each part of the groups."""
        if not self.sizes:
            return [list(part) for part in parts]
        ends = numpy.cumsum(self.sizes)
        return [[one for unit in part for one in range(int(ends[unit]) - self.sizes[unit], int(ends[unit]))] for part in parts]


@dataclass(frozen=True)
class Shares:
    """World ranks of every share of a batch."""

    members: tuple[tuple[int, ...], ...]
    """All ranks of the replica; those that neither hold nor read hold lengths only."""
    holders: tuple[tuple[int, ...], ...]
    """Members that hold tokens and fields; the first of them returns the results per token."""
    readers: tuple[tuple[int, ...], ...]
    """Further members that hold tokens alone."""
    stage: int = 0
    """Stage of the holders in the role's pipeline."""

    @classmethod
    def of_ranks(cls, ranks: Sequence[int]) -> Shares:
        """Make a share for each rank, held by it alone."""
        alone = tuple((rank,) for rank in ranks)
        return cls(alone, alone, ((),) * len(alone))

    @classmethod
    def of_all(cls, ranks: Sequence[int]) -> Shares:
        """Make one share, held by all of these ranks."""
        return cls((tuple(ranks),), (tuple(ranks),), ((),))

    @staticmethod
    def of_world(size: int) -> Shares:
        """Return `of_ranks` of all ranks of a world."""
        return _of_world(size)

    # In a world of thousands of ranks, hashing all members takes longer than an exchange; the ends tell divisions apart.
    def __hash__(self) -> int:
        return hash((self.count, self.members[0], self.members[-1], self.stage))

    @property
    def count(self) -> int:
        return len(self.members)

    @cached_property  # asked for each rank of a world of thousands
    def reporters(self) -> tuple[int, ...]:
        """World rank of each share that returns its results."""
        return tuple(ranks[0] for ranks in self.holders)

    @cached_property
    def ranks_that_hold(self) -> Tensor:
        """[count, H] int64, `holders`; the reporters are its first column."""
        return torch.from_numpy(numpy.array(self.holders))

    @cached_property
    def ranks_that_read(self) -> Tensor:
        """[count, R] int64, holders and `readers`."""
        return torch.from_numpy(numpy.array([(*holders, *readers) for holders, readers in zip(self.holders, self.readers)]))

    def index_of(self, rank: int) -> int | None:
        """Return the share of a world rank; None if it has none."""
        return self._index.get(rank)

    def describe(self, share: int) -> str:
        """Name the ranks that compute the results of a share."""
        return f"{name_ranks(self.holders[share])} (stage {self.stage})"

    @cached_property
    def _index(self) -> dict[int, int]:
        return {rank: index for index, ranks in enumerate(self.members) for rank in ranks}


@cache  # asked for every exchange
def _of_world(size: int) -> Shares:
    return Shares.of_ranks(range(size))


def shares_of(layout: ParallelLayout, ranks: Sequence[int] | None = None) -> Shares:
    """Return the shares of a role: the last pipeline stage holds tokens and fields, the first reads tokens. ranks: world rank of
    every position of the layout; None for a layout of the whole world."""
    at = range(layout.world_size) if ranks is None else ranks
    if layout.dp == layout.world_size and list(at) == list(range(layout.dp)):
        return Shares.of_world(layout.dp)  # the same object: no exchange compares thousands of ranks

    def stage(dp: int, pp: int) -> tuple[int, ...]:
        return tuple(at[layout.rank_of(tp=tp, cp=cp, dp=dp, pp=pp)] for cp in range(layout.cp) for tp in range(layout.tp))

    last = layout.pp - 1
    return Shares(
        members=tuple(tuple(rank for pp in range(layout.pp) for rank in stage(dp, pp)) for dp in range(layout.dp)),
        holders=tuple(stage(dp, last) for dp in range(layout.dp)),
        readers=tuple(stage(dp, 0) if last else () for dp in range(layout.dp)),
        stage=last,
    )
