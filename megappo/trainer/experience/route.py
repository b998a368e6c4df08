"""Exchange of samples between owners: an all-to-all of one buffer, field after field for every peer.

A route is worked out from the table and the owners on both sides, so the ranks exchange no sizes and no objects. Between every two
ranks samples go in order of their numbers. Fields of large shares go in several exchanges, so that buffers stay small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from megappo.data.positions import Spans
from megappo.data.ragged import Ragged
from megappo.parallel.device import world_group
from megappo.trainer.experience.owners import Owners

# Bytes of a mean share in one exchange. A message costs some 20 us of processor time on each end, as much as 100 KB over gloo.
MOST_BYTES_AT_ONCE = 16 << 20


class Wire(Protocol):
    """Exchange between some ranks of the world. ranks: theirs, in the order of the counts. places: `places_of` them."""

    ranks: Sequence[int]
    places: Tensor

    def all_to_all(self, received: Tensor, sent: Tensor, received_counts: Sequence[int], sent_counts: Sequence[int]) -> None:
        """Fill `received` [R] with what the others send to this rank, in exchange for `sent` [S]. Counts are elements per rank."""
        ...


def places_of(ranks: Sequence[int]) -> Tensor:
    """[largest rank + 1] int64, place of each world rank among `ranks`; -1 of others."""
    places = torch.full((max(ranks) + 1,), -1)
    places[torch.from_numpy(numpy.fromiter(ranks, dtype=numpy.int64))] = torch.arange(len(ranks))
    return places


class GroupWire:
    """Exchange over a process group. Collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self.places = places_of(self.ranks)

    def all_to_all(self, received: Tensor, sent: Tensor, received_counts: Sequence[int], sent_counts: Sequence[int]) -> None:
        dist.all_to_all_single(received, sent, list(received_counts), list(sent_counts), group=self._group)


class NoWire:
    """The only rank, from which nothing goes anywhere."""

    ranks: Sequence[int] = (0,)
    places = places_of((0,))

    def all_to_all(self, received: Tensor, sent: Tensor, received_counts: Sequence[int], sent_counts: Sequence[int]) -> None:
        received.copy_(sent)


def world_wire() -> Wire:
    """The wire of all ranks; of this one in a process without a world."""
    return GroupWire(world_group()) if dist.is_initialized() else NoWire()


@dataclass(frozen=True)
class Leg:
    """One end of a route on this rank: where in a batch or buffer the samples are, in the order in which they are wanted.

    rows: [R] int64, their places among its samples. spans: of their tokens. peers: [R] int64, whom each goes to or comes from.
    tokens, samples: [peers] int64, number that each sends or gets.
    """

    rows: Tensor
    spans: Spans
    peers: Tensor
    tokens: Tensor
    samples: Tensor

    @classmethod
    def of_nothing(cls, num_peers: int) -> Leg:
        none, zeros = torch.empty(0, dtype=torch.long), torch.zeros(num_peers, dtype=torch.long)
        return cls(none, Spans(none, none), none, zeros, zeros)

    @classmethod
    def sent(cls, rows: Tensor, peers: Tensor, lengths: Tensor, num_peers: int) -> Leg:
        """Samples of the local batch, peer by peer. rows: [R], ascending for each peer; peers: [R], places on the wire; lengths:
        [B], of all samples of the batch."""
        order = peers.argsort(stable=True)
        starts = (lengths.cumsum(0) - lengths)[rows[order]]
        spans = Spans(starts, lengths[rows[order]])
        return cls(rows[order], spans, peers[order], *_counts(peers, lengths[rows], num_peers))

    @classmethod
    def received(cls, peers: Tensor, lengths: Tensor, num_peers: int) -> Leg:
        """Samples of the buffer that arrives, in the order of the local batch. peers, lengths: [B]."""
        arriving = peers.argsort(stable=True)
        rows = arriving.argsort()
        in_buffer = lengths[arriving]
        starts = (in_buffer.cumsum(0) - in_buffer)[rows]
        return cls(rows, Spans(starts, lengths), peers, *_counts(peers, lengths, num_peers))

    def of_samples(self) -> Leg:
        """The leg of fields of one number per sample."""
        return Leg(self.rows, Spans(self.rows, torch.ones_like(self.rows)), self.peers, self.samples, self.samples)


def _counts(peers: Tensor, lengths: Tensor, num_peers: int) -> tuple[Tensor, Tensor]:
    """[num_peers] int64 each, tokens and samples of each peer."""
    tokens = torch.zeros(num_peers, dtype=torch.long).index_add_(0, peers, lengths)
    return tokens, peers.bincount(minlength=num_peers)


class _Part(NamedTuple):
    """A field in an exchange: its values on this rank, and both ends of its way."""

    values: Tensor
    sent: Leg
    received: Leg

    def bytes_of(self, leg: Leg) -> Tensor:
        """[peers] int64, to or from each."""
        return leg.tokens * self.values.itemsize

    def pieces(self) -> dict[int, list[Tensor]]:
        """Bytes for each peer that is sent any, in pieces."""
        slices = self.sent.spans.slices(self.values)
        if slices is None:
            peers = self.sent.tokens.nonzero().flatten()
            split = self.sent.spans.of(self.values).split(self.sent.tokens[peers].tolist()) if len(peers) else ()
            return {peer: [piece.view(torch.uint8)] for peer, piece in zip(peers.tolist(), split)}
        found: dict[int, list[Tensor]] = {}
        for peer, piece in zip(self.sent.peers.tolist(), slices):
            found.setdefault(peer, []).append(piece.view(torch.uint8))
        return found

    def found(self, arrived: Tensor, peers: Tensor, starts: Tensor) -> Tensor:
        """Values from the bytes that came, in the order of the local batch. peers: [P] int64, ascending, those that sent any field;
        starts: [P] int64, of this field's bytes."""
        leg, size, sizes = self.received, self.values.itemsize, self.bytes_of(self.received)[peers]
        if not leg.spans.are_long:
            blocks = [arrived[start : start + of_peer] for start, of_peer in zip(starts.tolist(), sizes.tolist())]
            # A gather: two to three times faster than placing what arrived.
            return leg.spans.of(torch.cat([arrived[:0], *blocks]).view(self.values.dtype))
        moved = (starts - (sizes.cumsum(0) - sizes))[torch.searchsorted(peers, leg.peers)]
        return Spans(leg.spans.starts * size + moved, leg.spans.lengths * size).of(arrived).view(self.values.dtype)


class Moved(NamedTuple):
    """Fields of the samples that have come, [T'] or [B'] each; none on a rank that is no holder. tokens: None if none were sent."""

    tokens: Tensor | None
    token_fields: dict[str, Tensor]
    sequence_fields: dict[str, Tensor]


@dataclass(frozen=True)
class Route:
    """Way of samples from one ownership to another, as one rank sees it.

    sent, received: of fields, which holders receive. sent_tokens, received_tokens: of tokens, which readers receive too. lengths:
    [B'] int64, of the samples that are here afterwards. mean_tokens: of all samples, for each rank of the wire. is_still: nothing
    moves, on any rank.
    """

    wire: Wire
    sent: Leg
    received: Leg
    sent_tokens: Leg
    received_tokens: Leg
    lengths: Tensor
    mean_tokens: int
    is_holder: bool
    is_still: bool

    @classmethod
    def between(cls, length: Tensor, source: Owners, target: Owners, rank: int, wire: Wire) -> Route:
        """The route for world rank `rank`, which is on the wire as all owners are. length: [N], of all samples."""
        before, after = source.numbers(rank), target.numbers(rank)
        shares, arriving, mean = target.shares, length[after].long(), int(length.sum()) // len(wire.ranks)
        index = shares.index_of(rank)
        is_holder = index is not None and rank in shares.holders[index]
        if len(wire.ranks) == 1 or (torch.equal(source.share, target.share) and source.shares == shares):
            none = Leg.of_nothing(len(wire.ranks))
            return cls(wire, none, none, none, none, arriving, mean, is_holder, is_still=True)
        legs = _Legs(source, target, rank, wire, before, after, length[before].long(), arriving)
        sent, received = legs.to(shares.ranks_that_hold)
        sent_tokens, received_tokens = legs.to(shares.ranks_that_read) if any(shares.readers) else (sent, received)
        return cls(wire, sent, received, sent_tokens, received_tokens, arriving, mean, is_holder, is_still=False)

    def moved(
        self, tokens: Tensor | None, token_fields: Mapping[str, Tensor] = {}, sequence_fields: Mapping[str, Tensor] = {}
    ) -> Moved:
        """Move the samples of this rank. Collective.

        tokens: [T] int64, or None; those that come are zeros on a rank that gets lengths alone. token_fields, sequence_fields: [T]
        and [B], the same names and types on every rank; read on ranks that send.
        """
        if self.is_still:
            return Moved(tokens, dict(token_fields), dict(sequence_fields))
        # Sorted: all ranks exchange them in the same order. int32 holds every token id in half the bytes.
        parts = [] if tokens is None else [_Part(tokens.int(), self.sent_tokens, self.received_tokens)]
        parts += [_Part(values, self.sent, self.received) for _, values in sorted(token_fields.items())]
        ends = self.sent.of_samples(), self.received.of_samples()
        parts += [_Part(values, *ends) for _, values in sorted(sequence_fields.items())]
        found = [values for group in self._groups(parts) for values in self._exchanged(group)]
        if tokens is not None:
            arrived = found.pop(0)
            tokens = arrived.long() if len(self.received_tokens.rows) else tokens.new_zeros(int(self.lengths.sum()))
        fields, ends = found[: len(token_fields)], found[len(token_fields) :]
        if not self.is_holder:
            return Moved(tokens, {}, {})
        return Moved(tokens, dict(zip(sorted(token_fields), fields)), dict(zip(sorted(sequence_fields), ends)))

    def ragged_fields(self, fields: Mapping[str, Ragged]) -> dict[str, Ragged]:
        """Move fields of some ids for each token, as `moved`."""
        if self.is_still:
            return dict(fields)
        moved = {name: self._ragged(values) for name, values in sorted(fields.items())}
        return moved if self.is_holder else {}

    def _ragged(self, values: Ragged) -> Ragged:
        """As counts and ids. A sample's ids are as contiguous as its tokens."""
        sent = values.select(self.sent.spans)
        counts, ids = sent.counts.new_empty(int(self.received.tokens.sum())), sent.ids
        self.wire.all_to_all(counts, sent.counts, self.received.tokens.tolist(), self.sent.tokens.tolist())
        sizes = _sums_of_parts(counts, self.received.tokens)
        arrived = ids.new_empty(sum(sizes))
        self.wire.all_to_all(arrived, ids, sizes, _sums_of_parts(sent.counts, self.sent.tokens))
        return Ragged(arrived, counts).select(self.received.spans)

    def _groups(self, parts: Sequence[_Part]) -> list[list[_Part]]:
        """Parts that go in one exchange, the same on every rank."""
        groups: list[list[_Part]] = []
        room = 0
        for part in parts:
            size = part.values.itemsize * self.mean_tokens
            if not groups or size > room:
                groups.append([])
                room = MOST_BYTES_AT_ONCE
            groups[-1].append(part)
            room -= size
        return groups

    def _exchanged(self, parts: Sequence[_Part]) -> list[Tensor]:
        """Values of all parts that come here, from one exchange of bytes: peer by peer, and for each one part after the other."""
        pieces = [part.pieces() for part in parts]
        sent = torch.stack([part.bytes_of(part.sent) for part in parts]).sum(0).tolist()
        sizes = torch.stack([part.bytes_of(part.received) for part in parts], 1)  # [peers, parts]
        received = sizes.sum(1)
        arrived = torch.empty(int(received.sum()), dtype=torch.uint8)
        receivers = sorted(set().union(*pieces))
        buffer = torch.cat([arrived[:0], *(piece for peer in receivers for part in pieces for piece in part.get(peer, ()))])
        self.wire.all_to_all(arrived, buffer, received.tolist(), sent)
        peers = received.nonzero().flatten()  # few of a world of thousands
        ends = sizes[peers].flatten().cumsum(0).view(-1, len(parts))
        return [part.found(arrived, peers, ends[:, place] - sizes[peers, place]) for place, part in enumerate(parts)]


@dataclass(frozen=True)
class _Legs:
    """Both ends of a route, for the ranks that a kind of payload goes to.

    before, after: [M], [M'] int64, numbers of the samples that this rank has. leaving, arriving: their lengths, int64.
    """

    source: Owners
    target: Owners
    rank: int
    wire: Wire
    before: Tensor
    after: Tensor
    leaving: Tensor
    arriving: Tensor

    def to(self, receivers: Tensor) -> tuple[Leg, Leg]:
        """(sent, received) if these world ranks of every share receive, [shares, R]. Only the reporter of a source share sends."""
        places, size, reporters = self.wire.places, len(self.wire.ranks), self.source.shares.ranks_that_hold[:, 0]
        none = self.before.new_empty(0)
        mine = self.source.shares.index_of(self.rank)
        rows, peers = none, none
        if mine is not None and int(reporters[mine]) == self.rank:
            to = places[receivers[self.target.share[self.before]]]  # [M, R]
            rows, peers = torch.arange(len(self.before)).repeat_interleave(to.shape[1]), to.flatten()
        sent = Leg.sent(rows, peers, self.leaving, size)
        theirs = self.target.shares.index_of(self.rank)
        peers, lengths = none, none
        if theirs is not None and bool((receivers[theirs] == self.rank).any()):
            peers, lengths = places[reporters[self.source.share[self.after]]], self.arriving
        return sent, Leg.received(peers, lengths, size)


def _sums_of_parts(counts: Tensor, sizes: Tensor) -> list[int]:
    """Sums of consecutive parts of `counts`, of these sizes [P] int64."""
    running = torch.cat([counts.new_zeros(1, dtype=torch.long), counts.long().cumsum(0)])
    return running[torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])].diff().tolist()
