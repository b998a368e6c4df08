"""Rows of ids per token, end to end: the ids that top-k and top-p kept, far fewer for most tokens than for the longest row.
A table [T, K] would take the longest row for every token; `padded` makes the table of a micro-batch, where an op reads it."""

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
    """Rows of ids, one per token."""

    ids: Tensor
    """[n] int32, row after row."""
    counts: Tensor
    """[T] int32, ids of each row."""
    known_width: int | None = None
    """`width`, if it was read before the rows went to a device."""

    @classmethod
    def of_table(cls, table: Tensor) -> Ragged:
        """Rows of table [T, K] int32 without their NO_ID."""
        there = table != NO_ID
        return cls(table[there], there.sum(1, dtype=torch.int32))

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        return cls(torch.cat([one.ids for one in parts]), torch.cat([one.counts for one in parts]))

    def __len__(self) -> int:
        return self.counts.numel()

    @cached_property
    def offsets(self) -> Tensor:
        """Start of each row in `ids`, and the end of the last: [T+1] int64."""
        return torch.cat([self.counts.new_zeros(1, dtype=torch.long), self.counts.cumsum(0)])

    def select(self, spans: Spans) -> Ragged:
        """Rows of the spans, one after the other."""
        first = self.offsets[spans.starts]
        ids = Spans(first, self.offsets[spans.starts + spans.lengths] - first)
        return Ragged(ids.of(self.ids), spans.of(self.counts))

    def spread(self, index: Tensor, num_rows: int) -> Ragged:
        """Move row t to row index[t] of `num_rows`; the others are empty. index: [T] int64, ascending."""
        return Ragged(self.ids, self.counts.new_zeros(num_rows).index_copy_(0, index, self.counts))

    @property
    def width(self) -> int:
        if self.known_width is not None:
            return self.known_width
        return int(self.counts.max()) if len(self) else 0

    def to(self, device: torch.device | str) -> Ragged:
        # The width is read here: on a GPU that would wait for it.
        return Ragged(moved(self.ids, device), moved(self.counts, device), self.width)

    def padded(self) -> Tensor:
        """Table [T, K] int32 of the ids of each row, then NO_ID; K is `width`."""
        there = torch.arange(self.width, device=self.counts.device) < self.counts[:, None]
        # masked_scatter: ids go to the places in their order, and no index of them is made.
        return self.ids.new_full(there.shape, NO_ID).masked_scatter_(there, self.ids)
