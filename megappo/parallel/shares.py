"""Division of a batch over the ranks of a role: one share per model replica, and the ranks that hold it. Pure values over world
ranks, equal everywhere, as ranks without the role send to it and receive from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy
import torch
from torch import Tensor

from megappo.parallel.layout import ParallelLayout
from megappo.runtime.messages import name_ranks


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
