"""The table of a step's samples: one row of numbers per sample, the same on every rank; and their owners, the share that each
belongs to. Owners, mini-batches and denominators are pure functions of the table, so ranks agree on them without communication.
Tokens and fields are on the owning ranks (`experience.py`)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from megappo.algo.aggregation import true_positions
from megappo.algo.chains import last_of_chains
from megappo.parallel.shares import Shares, parts_balanced
from megappo.parallel.totals import place_in_world, rows_of_ranks

# Rows in the first exchange of a table, relative to the mean per rank. Padding costs less than a second exchange, and this is
# enough for all rows where ranks draw their samples alone.
TIMES_THE_MEAN = 2


def balanced(lengths: Tensor, count: int) -> Tensor:
    """Return the share of each sample, [N] int64, with nearly equal tokens per share (`parallel.balance`)."""
    return torch.from_numpy(parts_balanced(lengths.long().numpy(), count))


@dataclass(frozen=True)
class SampleTable:
    """Rows of samples 0..N-1, [N] int32 each."""

    length: Tensor
    """Tokens, prompt included."""
    prompt: Tensor
    """Tokens before the first sampled one."""
    sampled: Tensor
    """Tokens sampled by the policy in this step."""
    truncated: Tensor
    """1 if the response was cut by the length limit."""
    oldest: Tensor
    """Oldest version of the weights that sampled the response."""
    newest: Tensor
    """Newest version."""
    owner: Tensor
    """World rank that drew it."""
    group: Tensor
    """Index of its prompt in the step, the same for all its responses; -1 without a group."""
    earlier: Tensor
    """Tokens before the first sampled one that the policy sampled in earlier steps."""
    unfinished: Tensor
    """1 if a later step continues the response."""
    previous: Tensor
    """Number of the sequence that this one continues with compacted context (`algo/chains.py`); -1 for a first or only one."""

    @cached_property
    def has_chains(self) -> bool:
        return bool((self.previous >= 0).any())

    @property
    def ends(self) -> Tensor:
        """[N] bool, the samples that end a trajectory in this step."""
        if not self.has_chains:
            return self.unfinished == 0
        goes_on = self.unfinished != 0
        goes_on[self.previous[self.previous >= 0].long()] = True
        return ~goes_on

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories: a chain of sequences counts once."""
        return int((self.previous < 0).sum())

    @property
    def response(self) -> Tensor:
        """[N] int32, tokens of each response that the policy sampled in this step or earlier."""
        return self.sampled + self.earlier

    @property
    def num_samples(self) -> int:
        return self.length.numel()

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum())

    def ages(self, step: int) -> Tensor:
        """Return [N] int32, the steps between the oldest weights that sampled a response and the weights at the start of `step`."""
        return step - 1 - self.oldest

    def balanced(self, count: int) -> Tensor:
        """Return the function `balanced` of the lengths, cached: [N] int64, read-only."""
        if count not in self._balanced:
            self._balanced[count] = balanced(self.length, count)
        return self._balanced[count]

    @cached_property
    def _balanced(self) -> dict[int, Tensor]:
        # By number of shares; every pass of a role asks for it.
        return {}

    def rows(self, chosen: Tensor) -> SampleTable:
        """Return the rows of these samples, int64 [M], in this order."""
        return replace(self, **{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

    @classmethod
    def agreed(cls, numbers: Tensor, mine: SampleTable, num_samples: int) -> SampleTable:
        """Gather the table of all samples from each rank's rows. Collective over the world.
        numbers: [M] int64, samples of the rows in `mine`. RuntimeError on every rank if a sample has no row or several."""
        names = [field.name for field in fields(cls)]
        mine_rows = torch.stack([numbers.int(), *(getattr(mine, name) for name in names)], 1)
        found = rows_of_ranks(mine_rows, expected=TIMES_THE_MEAN * -(-num_samples // place_in_world()[1]))
        order = found[:, 0].long()
        times = order.bincount(minlength=num_samples)
        wrong = true_positions(times != 1).tolist()
        if wrong:
            ranks = int(times[wrong[0]])
            raise RuntimeError(f"sample {wrong[0]} was drawn by {ranks or 'no'} ranks ({len(wrong)} such of {num_samples} in all)")
        # Fill row by row, then transpose: a rank's numbers lie as far apart as it has peers, and writes at power-of-two strides are
        # slow.
        rows = torch.empty(num_samples, 1 + len(names), dtype=torch.int32).index_copy_(0, order, found)
        return cls(*rows.T[1:].contiguous())


@dataclass(frozen=True)
class Owners:
    """Assignment of samples to shares. share: [N] int64, read-only. shares: the ranks of every share."""

    share: Tensor
    shares: Shares

    @classmethod
    def drawn(cls, table: SampleTable, world_size: int) -> Owners:
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
