"""Owners of samples: the share that each belongs to, as pure functions of the table, identical on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megappo.algo.chains import last_of_chains
from megappo.algo.chunks import true_positions
from megappo.parallel.shares import Shares
from megappo.trainer.experience.table import SampleTable, balanced


@dataclass(frozen=True)
class Owners:
    """Assignment of samples to shares. share: [N] int64, read-only. shares: the ranks of every share."""

    share: Tensor
    shares: Shares

    @classmethod
    def drawn(cls, table: SampleTable, world_size: int) -> Owners:
        """Give each sample to the rank that drew it."""
        return cls(table.owner.long(), Shares.of_world(world_size))

    @classmethod
    def spread(cls, table: SampleTable, world_size: int) -> Owners:
        """Balance tokens over the ranks of the world; all sequences of a trajectory go to one rank."""
        shares = Shares.of_world(world_size)
        if not table.has_chains:
            return cls.of_role(table, shares)
        last = last_of_chains(table.previous)
        lengths = torch.zeros_like(table.length).index_add(0, last, table.length)
        share, is_last = torch.zeros_like(last), table.ends
        share[is_last] = balanced(lengths[is_last], shares.count)
        return cls(share[last], shares)

    @classmethod
    def of_role(cls, table: SampleTable, shares: Shares) -> Owners:
        """Balance tokens over the replicas of a role, all samples at once."""
        return cls(table.balanced(shares.count), shares)

    @classmethod
    def of_prompts(cls, table: SampleTable, samples_per_prompt: int, world_size: int) -> Owners:
        """Balance tokens over the world, with all samples of a prompt on one rank."""
        prompts = balanced(table.length.view(-1, samples_per_prompt).sum(1), world_size)
        return cls(prompts.repeat_interleave(samples_per_prompt), Shares.of_world(world_size))

    @classmethod
    def everywhere(cls, table: SampleTable, world_size: int) -> Owners:
        """Give all samples to every rank, for instruments and tests."""
        return cls(torch.zeros(table.num_samples, dtype=torch.long), Shares.of_all(range(world_size)))

    def numbers(self, rank: int) -> Tensor:
        """Return [M] int64, ascending: samples that this world rank holds or knows the lengths of."""
        index = self.shares.index_of(rank)
        if index is None:
            return self.share.new_empty(0)
        if index not in self._numbers:
            self._numbers[index] = true_positions(self.share == index)
        return self._numbers[index]

    @cached_property
    def _numbers(self) -> dict[int, Tensor]:
        # By share; every exchange asks for it in both directions.
        return {}
