"""Some ids for each token, end to end: what top-k and top-p kept, of which most tokens have far fewer than the longest row.

A table [T, K] would take the longest row for every token; `padded` makes that of a micro-batch, where an op reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megappo.data.positions import Spans, moved

NO_ID = -1  # "none" in a table of token ids


@dataclass(frozen=True)
class Ragged:
    """Rows of ids. ids: [n] int32, row after row. counts: [T] int32, ids of each row. known_width: `width`, of rows on a device."""

    ids: Tensor
    counts: Tensor
    known_width: int | None = None

    @classmethod
    def of_table(cls, table: Tensor) -> Ragged:
        """Rows of table [T, K] int32 without their NO_ID."""
        there = table != NO_ID
        return cls(table[there], there.sum(1, dtype=torch.int32))

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """Rows of all parts, one part after the other."""
        return cls(torch.cat([one.ids for one in parts]), torch.cat([one.counts for one in parts]))

    def __len__(self) -> int:
        """Number of rows."""
        return self.counts.numel()

    @cached_property
    def offsets(self) -> Tensor:
        """[T+1] int64, where the ids of each row start, and their number."""
        return torch.cat([self.counts.new_zeros(1, dtype=torch.long), self.counts.cumsum(0)])

    def select(self, spans: Spans) -> Ragged:
        """Rows of the spans, one after the other."""
        first = self.offsets[spans.starts]
        ids = Spans(first, self.offsets[spans.starts + spans.lengths] - first)
        return Ragged(ids.of(self.ids), spans.of(self.counts))

    def spread(self, index: Tensor, num_rows: int) -> Ragged:
        """Row t as row index[t] of `num_rows`, the others empty; index: [T] int64, ascending."""
        return Ragged(self.ids, self.counts.new_zeros(num_rows).index_copy_(0, index, self.counts))

    @property
    def width(self) -> int:
        """Ids of the longest row."""
        if self.known_width is not None:
            return self.known_width
        return int(self.counts.max()) if len(self) else 0

    def to(self, device: torch.device | str) -> Ragged:
        # The width is read here: on a GPU that would wait for it.
        return Ragged(moved(self.ids, device), moved(self.counts, device), self.width)

    def padded(self) -> Tensor:
        """[T, K] int32: the ids of each row, then NO_ID; K: `width`."""
        there = torch.arange(self.width, device=self.counts.device) < self.counts[:, None]
        # masked_scatter: ids go to the places in their order, and no index of them is made.
        return self.ids.new_full(there.shape, NO_ID).masked_scatter_(there, self.ids)
