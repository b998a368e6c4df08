"""Owners of samples: which share each belongs to. Pure functions of the table, identical on every rank.

A plan of one kind never depends on another: `spread` balances all samples over the ranks of the world for scoring, advantages and
metrics; `of_role` over the replicas of a model, as its passes want them.
"""

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
    """share: [N] int64, the share that each sample belongs to, not to be written to. shares: the ranks of every share."""

    share: Tensor
    shares: Shares

    @classmethod
    def drawn(cls, table: SampleTable, world_size: int) -> Owners:
        """Each sample belongs to the rank that drew it."""
        return cls(table.owner.long(), Shares.of_world(world_size))

    @classmethod
    def spread(cls, table: SampleTable, world_size: int) -> Owners:
        """Balanced over the ranks of the world by tokens; all sequences of a trajectory belong to one rank."""
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
        """Balanced over the replicas of a role by tokens, all samples at once."""
        return cls(table.balanced(shares.count), shares)

    @classmethod
    def of_prompts(cls, table: SampleTable, samples_per_prompt: int, world_size: int) -> Owners:
        """All samples of a prompt belong to one rank; prompts are balanced over the world by tokens."""
        prompts = balanced(table.length.view(-1, samples_per_prompt).sum(1), world_size)
        return cls(prompts.repeat_interleave(samples_per_prompt), Shares.of_world(world_size))

    @classmethod
    def everywhere(cls, table: SampleTable, world_size: int) -> Owners:
        """Every rank holds all samples: for instruments and tests."""
        return cls(torch.zeros(table.num_samples, dtype=torch.long), Shares.of_all(range(world_size)))

    def numbers(self, rank: int) -> Tensor:
        """[M] int64, ascending: samples that this world rank holds or knows the lengths of."""
        index = self.shares.index_of(rank)
        if index is None:
            return self.share.new_empty(0)
        if index not in self._numbers:
            self._numbers[index] = true_positions(self.share == index)
        return self._numbers[index]

    @cached_property
    def _numbers(self) -> dict[int, Tensor]:
        """Share -> `numbers` of its ranks, which every exchange asks for, both ways."""
        return {}
