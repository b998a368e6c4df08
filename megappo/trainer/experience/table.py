"""The table of a step's samples: one row of numbers for each, the same on every rank.

Everything that is decided for all ranks alike - owners, mini-batches, denominators - is a pure function of it. Tokens and their
fields are on the ranks that own them (`experience.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from megappo.algo.chunks import true_positions
from megappo.parallel.balance import parts_balanced
from megappo.parallel.totals import place_in_world, rows_of_ranks

# Rows in the first exchange of a table: of ranks that draw their samples alone all, and padding costs less than a second exchange.
TIMES_THE_MEAN = 2


def balanced(lengths: Tensor, count: int) -> Tensor:
    """[N] int64 share of each sample, shares of nearly equal tokens (`parallel.balance`)."""
    return torch.from_numpy(parts_balanced(lengths.long().numpy(), count))


@dataclass(frozen=True)
class SampleTable:
    """Rows of samples 0..N-1, [N] int32 each.

    length: tokens, prompt included. prompt: tokens before the first sampled one. sampled: tokens that the policy sampled.
    truncated: 1 if the response was cut by the length limit. oldest, newest: versions of the weights that sampled it. owner: world
    rank that drew it. group: number of its prompt in the step, the same for all responses to it; -1 of a sample without a group.
    earlier: of the tokens before the first sampled one, those that the policy sampled in earlier steps. unfinished: 1 if the
    response goes on in a later step. previous: number of the sequence of the same trajectory that this one goes on from, as the
    context was compacted (`algo/chains.py`); -1 of the first one, and of a trajectory of one sequence.
    """

    length: Tensor
    prompt: Tensor
    sampled: Tensor
    truncated: Tensor
    oldest: Tensor
    newest: Tensor
    owner: Tensor
    group: Tensor
    earlier: Tensor
    unfinished: Tensor
    previous: Tensor

    @cached_property
    def has_chains(self) -> bool:
        """True if a trajectory is several sequences."""
        return bool((self.previous >= 0).any())

    @property
    def ends(self) -> Tensor:
        """[N] bool, samples with which a trajectory ends, in this step."""
        if not self.has_chains:
            return self.unfinished == 0
        goes_on = self.unfinished != 0
        goes_on[self.previous[self.previous >= 0].long()] = True
        return ~goes_on

    @property
    def num_trajectories(self) -> int:
        """Samples, but those of one trajectory counted once."""
        return int((self.previous < 0).sum())

    @property
    def response(self) -> Tensor:
        """[N] int32, tokens of each response that the policy sampled, in this step or before."""
        return self.sampled + self.earlier

    @property
    def num_samples(self) -> int:
        return self.length.numel()

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum())

    def ages(self, step: int) -> Tensor:
        """Steps from the weights that sampled to those that `step` starts with, [N] int32; of the oldest part of a response."""
        return step - 1 - self.oldest

    def balanced(self, count: int) -> Tensor:
        """[N] int64 share of each sample, shares of nearly equal tokens (`parallel.balance`). Not to be written to."""
        if count not in self._balanced:
            self._balanced[count] = balanced(self.length, count)
        return self._balanced[count]

    @cached_property
    def _balanced(self) -> dict[int, Tensor]:
        """Number of shares -> `balanced`, which every pass of a role asks for."""
        return {}

    def rows(self, chosen: Tensor) -> SampleTable:
        """Rows of these samples, int64 [M], in this order."""
        return replace(self, **{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

    @classmethod
    def agreed(cls, numbers: Tensor, mine: SampleTable, num_samples: int) -> SampleTable:
        """The table of all samples from the rows that each rank has. Collective over the world.

        numbers: [M] int64, samples of the rows of `mine`. RuntimeError on every rank if a sample has no row, or several.
        """
        names = [field.name for field in fields(cls)]
        mine_rows = torch.stack([numbers.int(), *(getattr(mine, name) for name in names)], 1)
        found = rows_of_ranks(mine_rows, expected=TIMES_THE_MEAN * -(-num_samples // place_in_world()[1]))
        order = found[:, 0].long()
        times = order.bincount(minlength=num_samples)
        wrong = true_positions(times != 1).tolist()
        if wrong:
            ranks = int(times[wrong[0]])
            raise RuntimeError(f"sample {wrong[0]} was drawn by {ranks or 'no'} ranks ({len(wrong)} such of {num_samples} in all)")
        # Row by row, then by columns: numbers of a rank lie as far apart as it has peers, and columns at powers of two are slow.
        rows = torch.empty(num_samples, 1 + len(names), dtype=torch.int32).index_copy_(0, order, found)
        return cls(*rows.T[1:].contiguous())
