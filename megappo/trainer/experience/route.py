"""Moves samples between owners with an all-to-all of one byte buffer, field after field for each peer, where the fields are: over
gloo on the host, over NCCL on a GPU. Routes follow from the table and the owners on both sides, so ranks exchange no sizes and no
objects, and wait for no device. Samples travel in order of their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from megappo.data.packing import Ragged, Spans
from megappo.parallel.device import world_group
from megappo.trainer.experience.table import Owners

# Bytes of a mean share in one exchange, which keeps buffers small. A message costs about 20 us of CPU time on each end, as much as
# 100 KB over gloo.
MOST_BYTES_AT_ONCE = 16 << 20


def places_of(ranks: Sequence[int]) -> Tensor:
    """Return [largest rank + 1] int64: the index of each world rank among `ranks`, -1 for other ranks."""
    places = torch.full((max(ranks) + 1,), -1)
    places[torch.from_numpy(numpy.fromiter(ranks, dtype=numpy.int64))] = torch.arange(len(ranks))
    return places


class Wire:
    """Exchange between the ranks of a process group, or of a single rank without one: a copy.
    ranks: of the world, in the order of the counts. places: `places_of` these ranks."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.ranks: Sequence[int] = (0,) if group is None else dist.get_process_group_ranks(group)
        self.places = places_of(self.ranks)

    def all_to_all(self, received: Tensor, sent: Tensor, received_counts: Sequence[int], sent_counts: Sequence[int]) -> None:
        """Fill `received` [R] with the data from the other ranks, in exchange for `sent` [S] on the same device. Counts are
        elements per rank. Collective over the group."""
        if self._group is None:
            received.copy_(sent)
        else:
            dist.all_to_all_single(received, sent, list(received_counts), list(sent_counts), group=self._group)

    def meet(self, device: torch.device) -> None:
        """Wait for all ranks, on the host, before exchanges on a device: these have a short limit, and a rank may have had a longer
        pass than others. Collective over the group."""
        if device.type != "cpu" and self._group is not None:
            dist.all_reduce(torch.zeros(1), group=self._group)


def world_wire() -> Wire:
    """Return the wire of all ranks, or of this rank alone without an initialized process group."""
    return Wire(world_group() if dist.is_initialized() else None)


@dataclass(frozen=True)
class Leg:
    """One end of a route on this rank: where the samples lie in a batch or buffer, in the order wanted.
    rows: [R] int64, indices of the samples. spans: of their tokens. peers: [R] int64, rank on the wire that each sample goes to or
    comes from. tokens, samples: [peers] int64, numbers sent to or received from each peer."""

    rows: Tensor
    spans: Spans
    peers: Tensor
    tokens: Tensor
    samples: Tensor

    @classmethod
    def sent(cls, rows: Tensor, peers: Tensor, lengths: Tensor, num_peers: int) -> Leg:
        """Order samples of the local batch by peer. rows: [R], ascending per peer. peers: [R], on the wire. lengths: [B], of the
        batch."""
        order = peers.argsort(stable=True)
        starts = (lengths.cumsum(0) - lengths)[rows[order]]
        spans = Spans(starts, lengths[rows[order]])
        return cls(rows[order], spans, peers[order], *_counts(peers, lengths[rows], num_peers))

    @classmethod
    def received(cls, peers: Tensor, lengths: Tensor, num_peers: int) -> Leg:
        """Find the samples of the arriving buffer in the order of the local batch. peers, lengths: [B]."""
        arriving = peers.argsort(stable=True)
        rows = arriving.argsort()
        in_buffer = lengths[arriving]
        starts = (in_buffer.cumsum(0) - in_buffer)[rows]
        return cls(rows, Spans(starts, lengths), peers, *_counts(peers, lengths, num_peers))

    def of_samples(self) -> Leg:
        return Leg(self.rows, Spans(self.rows, torch.ones_like(self.rows)), self.peers, self.samples, self.samples)


def _counts(peers: Tensor, lengths: Tensor, num_peers: int) -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(num_peers, dtype=torch.long).index_add_(0, peers, lengths)
    return tokens, peers.bincount(minlength=num_peers)


class _Part(NamedTuple):
    """A field in an exchange: its values on this rank and both ends of its route."""

    values: Tensor
    sent: Leg
    received: Leg

    def bytes_of(self, leg: Leg) -> Tensor:
        """Return the bytes to or from each peer, [peers] int64."""
        return leg.tokens * self.values.itemsize

    def pieces(self) -> dict[int, list[Tensor]]:
        """Return peer -> bytes to send, in pieces, for the peers that get any."""
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
        """Return the values in the order of the local batch. peers: [P] int64, ascending, those that sent anything. starts: [P]
        int64, where this field's bytes begin."""
        leg, size, sizes = self.received, self.values.itemsize, self.bytes_of(self.received)[peers]
        if not leg.spans.are_long:
            blocks = [arrived[start : start + of_peer] for start, of_peer in zip(starts.tolist(), sizes.tolist())]
            # A gather: two to three times faster than placing what arrived.
            return leg.spans.of(torch.cat([arrived[:0], *blocks]).view(self.values.dtype))
        moved = (starts - (sizes.cumsum(0) - sizes))[torch.searchsorted(peers, leg.peers)]
        return Spans(leg.spans.starts * size + moved, leg.spans.lengths * size).of(arrived).view(self.values.dtype)


@dataclass(frozen=True)
class Route:
    """Route of samples from one ownership to another, as one rank sees it.
    sent, received: for fields, which only holders receive. sent_tokens, received_tokens: for tokens, which readers receive too.
    lengths: [B'] int64, of the samples here afterwards. mean_tokens: per rank of the wire. is_still: nothing moves on any rank.
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
        """Build the route for world rank `rank`, which is on the wire like all owners. length: [N], of all samples."""
        before, after, size = source.numbers(rank), target.numbers(rank), len(wire.ranks)
        shares, arriving, mean = target.shares, length[after].long(), int(length.sum()) // size
        mine, theirs = source.shares.index_of(rank), shares.index_of(rank)
        is_holder, none = theirs is not None and rank in shares.holders[theirs], before.new_empty(0)
        if size == 1 or (torch.equal(source.share, target.share) and source.shares == shares):
            leg = Leg.received(none, none, size)
            return cls(wire, leg, leg, leg, leg, arriving, mean, is_holder, is_still=True)
        reporters = source.shares.ranks_that_hold[:, 0]

        def legs_to(receivers: Tensor) -> tuple[Leg, Leg]:
            """Return (sent, received). receivers: [shares, R], world ranks of each share that receive."""
            rows, peers = none, none
            if mine is not None and int(reporters[mine]) == rank:  # only the reporter of a source share sends
                to = wire.places[receivers[target.share[before]]]  # [M, R]
                rows, peers = torch.arange(len(before)).repeat_interleave(to.shape[1]), to.flatten()
            sent = Leg.sent(rows, peers, length[before].long(), size)
            peers, lengths = none, none
            if theirs is not None and bool((receivers[theirs] == rank).any()):
                peers, lengths = wire.places[reporters[source.share[after]]], arriving
            return sent, Leg.received(peers, lengths, size)

        sent, received = legs_to(shares.ranks_that_hold)
        sent_tokens, received_tokens = legs_to(shares.ranks_that_read) if any(shares.readers) else (sent, received)
        return cls(wire, sent, received, sent_tokens, received_tokens, arriving, mean, is_holder, is_still=False)

    def moved(
        self, tokens: Tensor | None, token_fields: Mapping[str, Tensor] = {}, sequence_fields: Mapping[str, Tensor] = {}
    ) -> tuple[Tensor | None, dict[str, Tensor], dict[str, Tensor]]:
        """Move the samples of this rank; return what arrived of each argument, no fields on a rank that is no holder. Collective
        over the wire. tokens: [T] int64, or None; zeros arrive on a rank that gets lengths alone. token_fields, sequence_fields:
        [T] and [B], with the same names and dtypes on every rank; values are read on ranks that send."""
        if self.is_still:
            return tokens, dict(token_fields), dict(sequence_fields)
        device = next(x.device for x in (tokens, *token_fields.values(), *sequence_fields.values()) if x is not None)
        self.wire.meet(device)
        # Sorted, so all ranks exchange them in the same order. int32 holds every token id in half the bytes.
        parts = [] if tokens is None else [_Part(tokens.int(), self.sent_tokens, self.received_tokens)]
        parts += [_Part(values, self.sent, self.received) for _, values in sorted(token_fields.items())]
        ends = self.sent.of_samples(), self.received.of_samples()
        parts += [_Part(values, *ends) for _, values in sorted(sequence_fields.items())]
        found = [values for group in self._groups(parts) for values in self._exchanged(group, device)]
        if tokens is not None:
            arrived = found.pop(0)
            tokens = arrived.long() if len(self.received_tokens.rows) else tokens.new_zeros(int(self.lengths.sum()))
        fields, ends = found[: len(token_fields)], found[len(token_fields) :]
        if not self.is_holder:
            return tokens, {}, {}
        return tokens, dict(zip(sorted(token_fields), fields)), dict(zip(sorted(sequence_fields), ends))

    def ragged_fields(self, fields: Mapping[str, Ragged]) -> dict[str, Ragged]:
        """Move ragged fields (ids per token), like `moved`."""
        if self.is_still:
            return dict(fields)
        moved = {name: self._ragged(values) for name, values in sorted(fields.items())}
        return moved if self.is_holder else {}

    def _ragged(self, values: Ragged) -> Ragged:
        """Move a field as counts and ids; a sample's ids are as contiguous as its tokens."""
        sent = values.select(self.sent.spans)
        counts, ids = sent.counts.new_empty(int(self.received.tokens.sum())), sent.ids
        self.wire.all_to_all(counts, sent.counts, self.received.tokens.tolist(), self.sent.tokens.tolist())
        sizes, own = (
            [size * ids.itemsize for size in _sums_of_parts(*part)]
            for part in ((counts, self.received.tokens), (sent.counts, self.sent.tokens))
        )
        arrived = ids.new_empty(sum(sizes) // ids.itemsize)
        self.wire.all_to_all(arrived.view(torch.uint8), ids.view(torch.uint8), sizes, own)  # gloo carries no int16
        return Ragged(arrived, counts).select(self.received.spans)

    def _groups(self, parts: Sequence[_Part]) -> list[list[_Part]]:
        groups: list[list[_Part]] = []
        room = 0
        for part in parts:
            size = part.values.itemsize * self.mean_tokens
            # The mean share is the same on every rank, so the groups are too.
            if not groups or size > room:
                groups.append([])
                room = MOST_BYTES_AT_ONCE
            groups[-1].append(part)
            room -= size
        return groups

    def _exchanged(self, parts: Sequence[_Part], device: torch.device) -> list[Tensor]:
        """Exchange the bytes of all parts at once, peer by peer and then part by part, and return the values that arrived."""
        pieces = [part.pieces() for part in parts]
        sent = torch.stack([part.bytes_of(part.sent) for part in parts]).sum(0).tolist()
        sizes = torch.stack([part.bytes_of(part.received) for part in parts], 1)  # [peers, parts]
        received = sizes.sum(1)
        arrived = torch.empty(int(received.sum()), dtype=torch.uint8, device=device)
        receivers = sorted(set().union(*pieces))
        buffer = torch.cat([arrived[:0], *(piece for peer in receivers for part in pieces for piece in part.get(peer, ()))])
        self.wire.all_to_all(arrived, buffer, received.tolist(), sent)
        peers = received.nonzero().flatten()  # few of a world of thousands
        ends = sizes[peers].flatten().cumsum(0).view(-1, len(parts))
        return [part.found(arrived, peers, ends[:, place] - sizes[peers, place]) for place, part in enumerate(parts)]


def _sums_of_parts(counts: Tensor, sizes: Tensor) -> list[int]:
    running = torch.cat([counts.new_zeros(1, dtype=torch.long), counts.long().cumsum(0)])
    return running[torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])].diff().tolist()
