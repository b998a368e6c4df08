"""Micro-batches of one pass: padded for a layout, and copied to the device one ahead of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megappo.data.packing import PackedBatch, padded_lengths
from megappo.data.positions import moved
from megappo.parallel.context import ContextShard, context_shard
from megappo.parallel.groups import ProcessGroups
from megappo.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a data-parallel replica."""

    batch: PackedBatch  # padded as the layout needs
    cu_seqlens: Tensor  # offsets of `batch` on the host, for the model to plan with
    real: Tensor  # [tokens of its sequences] int64, their positions in `batch`
    context: ContextShard | None  # this rank's tokens under context parallel

    @classmethod
    def of(cls, sequences: PackedBatch, groups: ProcessGroups) -> MicroBatch:
        """Pad these sequences. Without any the result is padding alone, so the rank still takes part in every collective."""
        padded, real = sequences.padded(*padding_multiples(groups.layout))
        return cls(padded, padded.cu_seqlens, real, context_shard(padded.cu_seqlens, groups.cp, padded.tokens.device))

    def to(self, device: torch.device) -> MicroBatch:
        """Copy all but `cu_seqlens` to the device; the copies are queued."""
        context = self.context
        if context is not None:
            context = replace(
                context,
                index=moved(context.index, device),
                order=moved(context.order, device),
                ranked=moved(context.ranked, device),
            )
        return MicroBatch(self.batch.to(device), self.cu_seqlens, moved(self.real, device), context)


class MicroBatches:
    """Micro-batches of one pass, made and copied to the device one ahead of the chunk that reads them.
    Every model chunk reads all of them in order; one that all chunks have read is freed. num_tokens: of each, with its padding."""

    def __init__(self, batch: PackedBatch, sequences: Sequence[Sequence[int]], groups: ProcessGroups, device: torch.device) -> None:
        self._batch, self._sequences, self._groups, self._device = batch, sequences, groups, device
        multiples, lengths = padding_multiples(groups.layout), batch.lengths
        self.num_tokens = [int(padded_lengths(lengths[list(chosen)], *multiples).sum()) for chosen in sequences]
        self._chunks_left = [groups.layout.vpp] * len(sequences)
        self._sent: dict[int, MicroBatch] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def of_chunk(self) -> Iterator[MicroBatch]:
        """Yield all micro-batches on the device, for one model chunk."""
        for index in range(len(self)):
            self._send(index)
            micro = self._sent[index]
            if index + 1 < len(self):  # queue the next copy before the model runs on this one
                self._send(index + 1)
            self._chunks_left[index] -= 1
            if self._chunks_left[index] == 0:
                del self._sent[index]
            yield micro

    def _send(self, index: int) -> None:
        if index not in self._sent:
            assert self._chunks_left[index] == self._groups.layout.vpp, f"micro-batch {index} was let go too early"
            chosen = self._batch.select(self._sequences[index])
            self._sent[index] = MicroBatch.of(chosen, self._groups).to(self._device)


def padding_multiples(layout: ParallelLayout) -> tuple[int, int]:
    """Return (multiple of a sequence's tokens, multiple of a micro-batch's tokens)."""
    return 2 * layout.cp if layout.cp > 1 else 1, token_cuts(layout)  # 2 cp: the zig-zag split of context parallel


def token_cuts(layout: ParallelLayout) -> int:
    """Count the shards of a micro-batch's activations between the layers' matrix products."""
    return layout.cp * (layout.tp if layout.sequence_parallel else 1)
