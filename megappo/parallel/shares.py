"""Division of a batch over the ranks of a role: one share for each model replica, and the ranks that hold it.

Pure values over world ranks, equal everywhere, also on ranks that the role does not live on: they send to it and receive from it.
"""

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
    """World ranks of every share of a batch.

    members: all ranks of the replica. holders: those of them that hold tokens and fields, the first of which hands back results per
    token. readers: further ones that hold tokens alone. The other members hold lengths only. stage: of the holders in the
    role's pipeline.
    """

    members: tuple[tuple[int, ...], ...]
    holders: tuple[tuple[int, ...], ...]
    readers: tuple[tuple[int, ...], ...]
    stage: int = 0

    @classmethod
    def of_ranks(cls, ranks: Sequence[int]) -> Shares:
        """A share for each rank, held by it alone."""
        alone = tuple((rank,) for rank in ranks)
        return cls(alone, alone, ((),) * len(alone))

    @classmethod
    def of_all(cls, ranks: Sequence[int]) -> Shares:
        """One share, held by all of these ranks."""
        return cls((tuple(ranks),), (tuple(ranks),), ((),))

    @staticmethod
    def of_world(size: int) -> Shares:
        """`of_ranks` of all ranks of a world."""
        return _of_world(size)

    # Of a world of thousands all members take longer than an exchange; the ends tell divisions apart.
    def __hash__(self) -> int:
        return hash((self.count, self.members[0], self.members[-1], self.stage))

    @property
    def count(self) -> int:
        return len(self.members)

    @cached_property  # asked for each rank of a world of thousands
    def reporters(self) -> tuple[int, ...]:
        """World rank of each share that hands back its results."""
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
        """Share of a world rank; None if it has none."""
        return self._index.get(rank)

    def describe(self, share: int) -> str:
        """Ranks that compute the results of a share, in words."""
        return f"{name_ranks(self.holders[share])} (stage {self.stage})"

    @cached_property
    def _index(self) -> dict[int, int]:
        return {rank: index for index, ranks in enumerate(self.members) for rank in ranks}


@cache  # asked for every exchange
def _of_world(size: int) -> Shares:
    return Shares.of_ranks(range(size))


def shares_of(layout: ParallelLayout, ranks: Sequence[int] | None = None) -> Shares:
    """Shares of a role. ranks: world rank of every position of the layout; None for a layout of the whole world.

    The last stage of a pipeline holds tokens and fields, the first one tokens.
    """
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
