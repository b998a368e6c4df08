"""Micro-batches as a layout needs them, and the pipeline schedule of Megatron-core that runs them.

Which sequences form a micro-batch and what is done with the model's output is `megatron.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from torch import Tensor

from megappo.data.packing import PackedBatch, moved, padded_lengths
from megappo.engine.megatron_p2p import PlannedCommunicator
from megappo.parallel.context import ContextShard, context_shard
from megappo.parallel.groups import ProcessGroups
from megappo.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class MicroBatch:
    """What the ranks of one data-parallel replica work on together.

    batch: padded as the layout needs. cu_seqlens: its offsets on the host, where the model plans with them.
    real: [tokens of its sequences] int64, where they stand in `batch`. context: this rank's tokens under context parallel.
    """

    batch: PackedBatch
    cu_seqlens: Tensor
    real: Tensor
    context: ContextShard | None

    @classmethod
    def of(cls, sequences: PackedBatch, groups: ProcessGroups) -> MicroBatch:
        """These sequences, padded. Without any it is padding alone, and takes part in every collective all the same."""
        padded, real = sequences.padded(*padding_multiples(groups.layout))
        return cls(padded, padded.cu_seqlens, real, context_shard(padded.cu_seqlens, groups.cp, padded.tokens.device))

    def to(self, device: torch.device) -> MicroBatch:
        """All but `cu_seqlens` on the device; the copies are queued."""
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
    """The micro-batches of one pass, made and brought to the device one by one: when one is asked for, the next is sent as well.

    num_tokens: of each with its padding. Every model chunk asks for all of them in their order; one that all chunks have had is
    let go.
    """

    def __init__(self, batch: PackedBatch, sequences: Sequence[Sequence[int]], groups: ProcessGroups, device: torch.device) -> None:
        self._batch, self._sequences, self._groups, self._device = batch, sequences, groups, device
        multiples, lengths = padding_multiples(groups.layout), batch.lengths
        self.num_tokens = [int(padded_lengths(lengths[list(chosen)], *multiples).sum()) for chosen in sequences]
        self._chunks_left = [groups.layout.vpp] * len(sequences)
        self._sent: dict[int, MicroBatch] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def of_chunk(self) -> Iterator[MicroBatch]:
        """All micro-batches on the device, for one model chunk."""
        for index in range(len(self)):
            self._send(index)
            micro = self._sent[index]
            if index + 1 < len(self):
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
    """Of the tokens of every sequence, and of a micro-batch."""
    return 2 * layout.cp if layout.cp > 1 else 1, token_cuts(layout)  # 2 cp: zig-zag


def token_cuts(layout: ParallelLayout) -> int:
    """Parts into which the activations of a micro-batch are cut between the layers' matrix products."""
    return layout.cp * (layout.tp if layout.sequence_parallel else 1)


# (micro-batch, output of the last stage) -> what Megatron's schedules take: loss, token count, reported values
ComputeLoss = Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor, dict]]


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    micro_batches: MicroBatches,
    compute_loss: ComputeLoss,
    groups: ProcessGroups,
    *,
    forward_only: bool,
) -> None:
    """One pass: forward, and backward with gradient reduction unless `forward_only`.

    compute_loss runs on the last stage, in order of the micro-batches.
    chunks: this rank's model chunks, wrapped in DDP where they train. Collective over the role's ranks.
    """
    layout, config = groups.layout, chunks[0].config

    def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable]:
        micro = next(iterator)
        return model(micro.batch.tokens, micro.cu_seqlens, micro.context, micro.real), partial(compute_loss, micro)

    common: dict[str, Any] = dict(
        forward_step_func=forward_step,
        num_microbatches=len(micro_batches),
        # The communicator knows the lengths, these two are only read for fixed shapes.
        seq_length=micro_batches.num_tokens[0],
        micro_batch_size=1,
        forward_only=forward_only,
        pg_collection=groups.collection,
    )
    if layout.pp > 1:
        tokens = [num_tokens // token_cuts(layout) for num_tokens in micro_batches.num_tokens]
        common["p2p_communicator"] = PlannedCommunicator(groups.pp, config, tokens)
    if layout.vpp > 1:
        iterators = [micro_batches.of_chunk() for _ in chunks]
        forward_backward_pipelining_with_interleaving(data_iterator=iterators, model=list(chunks), **common)
        return
    schedule = forward_backward_pipelining_without_interleaving if layout.pp > 1 else forward_backward_no_pipelining
    schedule(data_iterator=micro_batches.of_chunk(), model=chunks[0], **common)
