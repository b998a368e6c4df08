"""Experience of a step: the table of all samples, and the tokens and fields of the samples that this rank owns. A rank's memory and
work depend on its own samples, apart from one table row for each sample of the world."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megappo.algo.aggregation import in_chunks, tokens_per_sequence, true_positions
from megappo.data.packing import PackedBatch
from megappo.parallel.shares import Shares
from megappo.parallel.totals import place_in_world, total
from megappo.trainer.experience.route import Route, Wire, world_wire
from megappo.trainer.experience.table import Owners, SampleTable


@dataclass(frozen=True)
class Experience:
    """Table of all samples and their owners, on the host, and the samples of this rank by ascending number, there or on a device.
    rank: of this process in the world. wire: moves samples, by default between all ranks of the world. absent: a batch of no
    sequences with the holders' fields, on a rank that holds none and takes part in their exchanges."""

    table: SampleTable
    owners: Owners
    batch: PackedBatch
    rank: int
    wire: Wire
    absent: PackedBatch | None = None

    @property
    def numbers(self) -> Tensor:
        """[B] int64, numbers of the samples of `batch`."""
        return self.owners.numbers(self.rank)

    def with_fields(self, token_fields: Mapping[str, Tensor] = {}, sequence_fields: Mapping[str, Tensor] = {}) -> Experience:
        return replace(self, batch=self.batch.with_fields(token_fields, sequence_fields))

    def with_batch(self, batch: PackedBatch) -> Experience:
        return replace(self, batch=batch)

    def to(self, device: torch.device) -> Experience:
        """Copy the samples to the device, where later exchanges and results are too; the copies are queued."""
        return replace(self, batch=self.batch.to(device), absent=None if self.absent is None else self.absent.to(device))

    def redistribute(self, owners: Owners, fields: Collection[str] | None = None, wire: Wire | None = None) -> Experience:
        """Move the samples to other owners with these fields (None: all). Collective over the wire.
        All ranks must have and name the same fields. Other fields are dropped: reading them raises KeyError."""
        kept = self if fields is None else self.only(fields)
        batch = kept.batch
        given = batch if kept.absent is None else kept.absent
        route = Route.between(self.table.length, self.owners, owners, self.rank, wire or self.wire)
        if route.is_still:
            return replace(kept, owners=owners)
        tokens, token_fields, sequence_fields = route.moved(batch.tokens, given.token_fields, given.sequence_fields)
        moved = replace(
            batch,
            tokens=tokens,
            token_fields=token_fields,
            sequence_fields=sequence_fields,
            ragged_fields=route.ragged_fields(given.ragged_fields),
        )
        moved = moved.with_lengths(route.lengths)
        return replace(self, owners=owners, batch=moved, absent=None if route.is_holder else given.select([]))

    def only(self, fields: Collection[str]) -> Experience:
        """Keep only these fields, as `redistribute` does."""
        absent = None if self.absent is None else self.absent.only(fields)
        return replace(self, batch=self.batch.only(fields), absent=absent)

    def for_role(self, shares: Shares, fields: Collection[str]) -> Experience:
        """Send tokens and these fields to where a role's pass over all samples needs them. Collective over the world."""
        return self.redistribute(Owners.of_role(self.table, shares), fields)

    def with_results(
        self, share: Experience, token_names: Sequence[str], sequence_names: Sequence[str], results: Mapping[str, Tensor]
    ) -> Experience:
        """Add fp32 results of a role, sent by its reporters to the owners of the samples. Collective over the world.
        results: [T] and [B] of the samples of `share`; only reporters need to have them."""
        route = Route.between(self.table.length, share.owners, self.owners, self.rank, self.wire)
        nothing = torch.empty(0, device=self.batch.device)
        of_tokens, of_samples = ({name: results.get(name, nothing) for name in names} for names in (token_names, sequence_names))
        return self.with_fields(*route.moved(None, of_tokens, of_samples)[1:])

    def everywhere(self, fields: Collection[str] | None = None) -> PackedBatch:
        """Return all samples with these fields (None: all) on every rank, for instruments and tests. Collective over the world."""
        return self.redistribute(Owners.everywhere(self.table, place_in_world()[1]), fields).batch

    def texts(self, texts: Sequence[str], owners: Owners) -> list[str]:
        """Send this rank's texts to the samples' other owners, as bytes; return those received. Collective over the world."""
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        lengths = self.column(torch.tensor([len(one) for one in encoded], dtype=torch.float64)).long()
        flat = torch.tensor(bytearray(b"".join(encoded)), dtype=torch.uint8)
        route = Route.between(lengths, self.owners, owners, self.rank, self.wire)
        found = route.moved(None, {"text": flat})[1]["text"].split(lengths[owners.numbers(self.rank)].tolist())
        return [bytes(part.numpy()).decode("utf-8", "surrogatepass") for part in found]

    def column(self, values: Tensor) -> Tensor:
        """Gather one number per sample: [N] fp64 on the host from this rank's [B], which the host waits for on a device. Collective
        over the world."""
        column = torch.zeros(self.table.num_samples, dtype=torch.float64)
        column[self.numbers] = values.double().cpu()
        return total(column)

    @classmethod
    def of_drawn(
        cls,
        numbers: Tensor,
        drawn: PackedBatch,
        num_samples: int,
        versions: tuple[Tensor, Tensor],
        groups: Tensor | None = None,
        previous: Tensor | None = None,
    ) -> Experience:
        """Agree on the table and spread the samples that the ranks drew over all ranks. Collective over the world.
        numbers: [M] int64, ascending, of the samples that this rank drew. drawn: those samples, with response_mask and truncated.
        versions: oldest and newest weights that sampled them, [M] each. groups, previous: [M], as in the table; None for samples
        without a group, and for trajectories of one sequence."""
        rank, world_size = place_in_world()
        table = SampleTable.agreed(numbers, rows_of(drawn, versions, rank, groups, previous), num_samples)
        experience = cls(table, Owners.drawn(table, world_size), drawn, rank, world_wire())
        return experience.redistribute(Owners.spread(table, world_size))

    @classmethod
    def of_own(cls, batch: PackedBatch) -> Experience:
        """Number the sequences of all ranks, rank by rank, as experience for passes only. Collective over the world.
        No token counts as sampled (`sampled` is 0), so `first_epoch` refuses these sequences for updates."""
        rank, world_size = place_in_world()
        counts = torch.zeros(world_size, dtype=torch.long)
        counts[rank] = batch.num_sequences
        counts = total(counts)
        numbers = torch.arange(batch.num_sequences) + int(counts[:rank].sum())
        nothing = torch.zeros(batch.num_sequences, dtype=torch.int32)
        lengths = batch.lengths.int()
        rows = SampleTable(
            lengths, lengths, nothing, nothing, nothing, nothing, nothing + rank, nothing - 1, nothing, nothing, nothing - 1
        )
        table = SampleTable.agreed(numbers, rows, int(counts.sum()))
        return cls(table, Owners.drawn(table, world_size), batch, rank, world_wire())

    @classmethod
    def of_whole(cls, batch: PackedBatch) -> Experience:
        """Build experience from a batch of every rank with response_mask and truncated, and group and previous if any. Not
        collective."""
        rank, world_size = place_in_world()
        version = torch.zeros(batch.num_sequences, dtype=torch.int32)
        groups, previous = (batch[name] if name in batch else None for name in ("group", "previous"))
        table = rows_of(batch, (version, version), 0, groups, previous)
        owners = Owners.spread(table, world_size)
        return cls(table, owners, batch.select(owners.numbers(rank)), rank, world_wire())


def rows_of(
    batch: PackedBatch, versions: tuple[Tensor, Tensor], owner: int, groups: Tensor | None = None, previous: Tensor | None = None
) -> SampleTable:
    """Return the table rows of a batch with response_mask and truncated, and with whole_mask and unfinished for partial rollouts.
    versions, groups, previous: as in `Experience.of_drawn`."""
    mask, lengths = batch["response_mask"], batch.lengths
    sampled, nothing = tokens_per_sequence(mask, batch.cu_seqlens), torch.zeros_like(lengths)
    columns = (
        lengths,
        _prompt_lengths(mask, batch.cu_seqlens, sampled),
        sampled,
        batch["truncated"],
        *versions,
        torch.full_like(lengths, owner),
        torch.full_like(lengths, -1) if groups is None else groups,
        tokens_per_sequence(batch["whole_mask"], batch.cu_seqlens) - sampled if "whole_mask" in batch else nothing,
        batch["unfinished"] if "unfinished" in batch else nothing,
        nothing - 1 if previous is None else previous,
    )
    return SampleTable(*(column.int() for column in columns))


def _prompt_lengths(mask: Tensor, cu_seqlens: Tensor, sampled: Tensor) -> Tensor:
    """Return [B] tokens before the first sampled one, or all tokens if none was sampled. sampled: [B] counts."""
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    wanted = sampled.cumsum(0) - sampled  # place of each sequence's first among all sampled tokens
    first, passed, start = torch.zeros_like(starts), 0, 0
    for (chunk,) in in_chunks(mask):
        positions = true_positions(chunk)
        here = (wanted >= passed) & (wanted < passed + len(positions))
        first[here] = start + positions[wanted[here] - passed]
        passed, start = passed + len(positions), start + len(chunk)
    return torch.where(sampled > 0, first - starts, ends - starts)
