"""Packed batches: sequences laid end to end without padding, the one batch type of every hot path, with fields per token and per
sequence and ragged rows of ids per token: what top-k and top-p kept, far fewer for most tokens than for the longest row. A table
[T, K] would take the longest row for every token; `padded` makes the table of a micro-batch, where an op reads it.
`parallel/shares.py` cuts batches into micro-batches; `algo/` aligns log-probs and values to tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm

import torch
from torch import Tensor

LONG = 2048  # mean elements of a span from which on slices are faster than an index of every element, and take no memory


@dataclass(frozen=True)
class Spans:
    """Spans of a flat tensor, gathered one after the other. starts, lengths: [M] int64 on the host, wherever the tensor is."""

    starts: Tensor
    lengths: Tensor

    def of(self, values: Tensor) -> Tensor:
        """Elements of the spans, [sum of lengths, ...]."""
        slices = self.slices(values)
        return values.index_select(0, self.positions(values.device)) if slices is None else torch.cat([values[:0], *slices])

    def slices(self, values: Tensor) -> list[Tensor] | None:
        """View of each span; None if they are short, since an index of every element is then faster."""
        return None if self._bounds is None else [values[start:end] for start, end in self._bounds]

    @cached_property
    def are_long(self) -> bool:
        return int(self.lengths.sum()) >= LONG * len(self.lengths)

    @cached_property
    def _bounds(self) -> list[tuple[int, int]] | None:
        if not self.are_long:
            return None
        return list(zip(self.starts.tolist(), (self.starts + self.lengths).tolist()))

    def positions(self, device: torch.device) -> Tensor:
        """Position of each element, as `token_positions`."""
        if device not in self._positions:
            self._positions[device] = token_positions(self.starts, self.lengths, device)
        return self._positions[device]

    @cached_property
    def _positions(self) -> dict[torch.device, Tensor]:
        # Every field of a batch is gathered by it.
        return {}


_HOST = torch.device("cpu")


def token_positions(starts: Tensor, lengths: Tensor, device: torch.device = _HOST) -> Tensor:
    """Positions of spans on the device, [sum of lengths] int64: starts[0], starts[0] + 1, ..., then from starts[1].
    starts, lengths: [M] int64 on the host, so no size is waited for."""
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    # Steps of 1 and a jump at each start, added up: 0.7 ns a token, against 6 ns by repeating starts and subtracting offsets.
    steps = torch.ones(int(lengths.sum()), dtype=torch.long, device=device)
    if lengths.numel():
        jumps = starts.clone()
        jumps[1:] -= starts[:-1] + lengths[:-1] - 1
        at, jumps = moved(torch.stack([lengths.cumsum(0) - lengths, jumps]), device)
        steps.index_copy_(0, at, jumps)
    return steps.cumsum_(0)  # in place: no second column of 8 bytes


def moved(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to the device; to a GPU without waiting for the transfer."""
    if x.device.type == "cpu" and torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)  # asynchronous only from pinned memory
    return x.to(device)


NO_ID = -1  # "none" in a table of ids
ROUTES = "routes"
"""Ragged field of the experts that the sampler chose for a token: in every sparse layer top_k of them, or of no layer any."""


def route_dtype(num_experts: int) -> torch.dtype:
    """Return the type of an expert's number in the field `ROUTES`."""
    return torch.uint8 if num_experts <= 256 else torch.int16


@dataclass(frozen=True)
class Ragged:
    """Rows of ids, one per token. The ids may be on a device, their counts are on the host: sizes come from them."""

    ids: Tensor
    """[n] int32, row after row; routes of experts are uint8 or int16."""
    counts: Tensor
    """[T] int32, ids of each row."""

    @classmethod
    def of_table(cls, table: Tensor) -> Ragged:
        """Rows of table [T, K] int32 without their NO_ID."""
        there = table != NO_ID
        return cls(table[there], there.sum(1, dtype=torch.int32).cpu())

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
        return int(self.counts.max()) if len(self) else 0

    def to(self, device: torch.device | str) -> Ragged:
        return Ragged(moved(self.ids, device), self.counts)

    def padded(self) -> Tensor:
        """Table [T, K] of the ids of each row, then NO_ID; K is `width`. int32, of routes int16."""
        there = torch.arange(self.width, device=self.ids.device) < moved(self.counts, self.ids.device)[:, None]
        ids = self.ids.short() if self.ids.dtype == torch.uint8 else self.ids
        # masked_scatter: ids go to the places in their order, and no index of them is made.
        return ids.new_full(there.shape, NO_ID).masked_scatter_(there, ids)


@dataclass(frozen=True)
class PackedBatch:
    """Sequences b = 0..B-1 laid end to end."""

    tokens: Tensor
    """[T] int64."""
    cu_seqlens: Tensor
    """[B+1] int32: sequence b starts at cu_seqlens[b], and cu_seqlens[B] = T."""
    token_fields: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> [T] (or [T, ...]), one value per token."""
    sequence_fields: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> [B], one value per sequence."""
    ragged_fields: Mapping[str, Ragged] = field(default_factory=dict)
    """Name -> T rows, any number of ids per token."""
    left_out: frozenset[str] = frozenset()
    """Names of fields that `only` dropped; reading one of them raises KeyError."""
    offsets: Tensor | None = None
    """`cu_seqlens` on the host, of a batch on a device: what is planned by lengths waits for nothing."""

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def host_offsets(self) -> Tensor:
        """[B+1] int32 on the host: `cu_seqlens`."""
        return self.cu_seqlens if self.offsets is None else self.offsets

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, [B] int64 on the host."""
        return (self.host_offsets[1:] - self.host_offsets[:-1]).long()

    def of_tokens(self, values: Tensor) -> Tensor:
        """Repeat values [B] for the tokens of each sequence: [T]."""
        lengths = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()
        return moved(values, self.device).repeat_interleave(lengths, output_size=self.num_tokens)

    def with_lengths(self, lengths: Tensor) -> PackedBatch:
        """Replace the sequences' borders. lengths: [B'] int64 on the host, for fields of as many tokens and sequences."""
        offsets = cu_seqlens_of(lengths)
        return replace(self, cu_seqlens=moved(offsets, self.device), offsets=offsets)

    def __getitem__(self, name: str) -> Tensor:
        self._require_there(name)
        if name in self.token_fields:
            return self.token_fields[name]
        return self.sequence_fields[name]

    def ragged(self, name: str) -> Ragged:
        self._require_there(name)
        return self.ragged_fields[name]

    def __contains__(self, name: str) -> bool:
        self._require_there(name)
        return name in self.token_fields or name in self.sequence_fields or name in self.ragged_fields

    def _require_there(self, name: str) -> None:
        if name in self.left_out:
            raise KeyError(f"the batch's field {name!r} was left out of this pass: name it among the fields that the pass reads")

    def only(self, names: Collection[str]) -> PackedBatch:
        """Keep only these fields; names that the batch does not have are ignored."""
        return replace(
            self,
            token_fields={k: v for k, v in self.token_fields.items() if k in names},
            sequence_fields={k: v for k, v in self.sequence_fields.items() if k in names},
            ragged_fields={k: v for k, v in self.ragged_fields.items() if k in names},
            left_out=self.left_out
            | {k for k in (*self.token_fields, *self.sequence_fields, *self.ragged_fields) if k not in names},
        )

    def with_fields(
        self,
        token_fields: Mapping[str, Tensor] = {},
        sequence_fields: Mapping[str, Tensor] = {},
        ragged_fields: Mapping[str, Ragged] = {},
    ) -> PackedBatch:
        """Add fields, or replace those of the same names."""
        for name, value in token_fields.items():
            assert value.shape[:1] == self.tokens.shape, f"{name}: {tuple(value.shape)} are not of {self.num_tokens} tokens"
        for name, rows in ragged_fields.items():
            assert len(rows) == self.num_tokens, f"{name}: {len(rows)} rows for {self.num_tokens} tokens"
        for name, value in sequence_fields.items():
            assert value.shape[0] == self.num_sequences, f"{name}: {len(value)} values for {self.num_sequences} sequences"
        return replace(
            self,
            token_fields={**self.token_fields, **token_fields},
            sequence_fields={**self.sequence_fields, **sequence_fields},
            ragged_fields={**self.ragged_fields, **ragged_fields},
            left_out=self.left_out - {*token_fields, *sequence_fields, *ragged_fields},
        )

    def spans(self, sequences: Sequence[int] | Tensor) -> Spans:
        """Tokens of these sequences, in the given order."""
        chosen = torch.as_tensor(sequences, dtype=torch.long)
        return Spans(self.host_offsets[:-1].long()[chosen], self.lengths[chosen])

    def token_index(self, sequences: Sequence[int] | Tensor) -> Tensor:
        """Positions of these sequences' tokens in this batch, in the given order; [sum of lengths] int64."""
        return self.spans(sequences).positions(self.device)

    def select(self, sequences: Sequence[int] | Tensor) -> PackedBatch:
        """Select sequences with all their fields, in the given order."""
        spans, chosen = self.spans(sequences), moved(torch.as_tensor(sequences, dtype=torch.long), self.device)
        selected = replace(
            self,
            tokens=spans.of(self.tokens),
            token_fields={k: spans.of(v) for k, v in self.token_fields.items()},
            sequence_fields={k: v[chosen] for k, v in self.sequence_fields.items()},
            ragged_fields={k: v.select(spans) for k, v in self.ragged_fields.items()},
        )
        return selected.with_lengths(spans.lengths)

    def padded(self, sequence_multiple: int = 1, total_multiple: int = 1) -> tuple[PackedBatch, Tensor]:
        """Pad every sequence to a multiple; returns the batch and [real tokens] int64, the new positions of the tokens.

        Padding is zeros (tokens 0, fields 0 or False, no ids) at the end of a sequence. A sequence of padding alone is added if the
        total is 0 or no multiple of `total_multiple`. Context parallel needs sequences of a multiple of 2 cp tokens, sequence
        parallel a total that is a multiple of cp tp.
        """
        lengths = padded_lengths(self.lengths, sequence_multiple, total_multiple)
        total, is_completed = int(lengths.sum()), lengths.numel() > self.num_sequences  # completed: one sequence of padding more
        starts = (lengths.cumsum(0) - lengths)[: self.num_sequences]
        places = Spans(starts, self.lengths)
        index = places.positions(self.device)
        if total == self.num_tokens:
            return self, index

        def spread(x: Tensor) -> Tensor:
            return x.new_zeros((total, *x.shape[1:])).index_copy_(0, index, x)

        batch = replace(
            self,
            tokens=spread(self.tokens),
            token_fields={k: spread(v) for k, v in self.token_fields.items()},
            sequence_fields={
                k: torch.cat([v, v.new_zeros(int(is_completed), *v.shape[1:])]) for k, v in self.sequence_fields.items()
            },
            ragged_fields={k: v.spread(places.positions(_HOST), total) for k, v in self.ragged_fields.items()},
        )
        return batch.with_lengths(lengths), index

    def to(self, device: torch.device | str) -> PackedBatch:
        return replace(
            self,
            tokens=moved(self.tokens, device),
            cu_seqlens=moved(self.cu_seqlens, device),
            offsets=self.host_offsets,
            token_fields={k: moved(v, device) for k, v in self.token_fields.items()},
            sequence_fields={k: moved(v, device) for k, v in self.sequence_fields.items()},
            ragged_fields={k: v.to(device) for k, v in self.ragged_fields.items()},
        )


def joined(batches: Sequence[PackedBatch]) -> PackedBatch:
    """Join one or more batches of the same fields, end to end."""
    first = batches[0]
    whole = replace(
        first,
        tokens=torch.cat([one.tokens for one in batches]),
        token_fields={k: torch.cat([one.token_fields[k] for one in batches]) for k in first.token_fields},
        sequence_fields={k: torch.cat([one.sequence_fields[k] for one in batches]) for k in first.sequence_fields},
        ragged_fields={k: Ragged.joined([one.ragged_fields[k] for one in batches]) for k in first.ragged_fields},
    )
    return whole.with_lengths(torch.cat([one.lengths for one in batches]))


def padded_lengths(lengths: Tensor, sequence_multiple: int = 1, total_multiple: int = 1) -> Tensor:
    """Lengths of the sequences of `PackedBatch.padded`, [B] int64, or [B+1] with the sequence that completes the total."""
    lengths = -(-lengths // sequence_multiple) * sequence_multiple
    multiple = lcm(sequence_multiple, total_multiple)
    total = int(lengths.sum())
    missing = max(1, -(-total // multiple)) * multiple - total  # at least 1: an empty micro-batch runs every collective too
    return torch.cat([lengths, lengths.new_full((1,), missing)]) if missing else lengths


def cu_seqlens_of(lengths: Tensor | Sequence[int]) -> Tensor:
    """Offsets [B+1] int32 from 0 of lengths [B]."""
    lengths = torch.as_tensor(lengths)
    out = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=lengths.device)  # kernels of attention want int32
    out[1:] = lengths.cumsum(0)
    return out


def pack(sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> PackedBatch:
    """Pack lists of token ids into a batch without fields."""
    flat = [token for sequence in sequences for token in sequence]
    lengths = torch.tensor([len(s) for s in sequences], dtype=torch.long)
    return PackedBatch(torch.tensor(flat, dtype=torch.long), cu_seqlens_of(lengths)).to(device)
