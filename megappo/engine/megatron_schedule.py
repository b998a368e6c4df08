"""Micro-batches as a layout needs them, and the pipeline schedule of Megatron-core that runs them.

Which sequences form a micro-batch and what is done with the model's output is `megatron.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Iterator, Optional, Sequence

import torch
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from torch import Tensor

from megappo.data.packing import PackedBatch
from megappo.engine.megatron_p2p import PlannedCommunicator
from megappo.parallel.context import ContextShard, context_shard
from megappo.parallel.groups import ProcessGroups
from megappo.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class MicroBatch:
    """What the ranks of one data-parallel replica work on together.

    batch: padded as the layout needs, on the device. cu_seqlens: its offsets on the host, where the model plans with them.
    real: [tokens of its sequences] int64, where they stand in `batch`. context: this rank's tokens under context parallel.
    """

    batch: PackedBatch
    cu_seqlens: Tensor
    real: Tensor
    context: Optional[ContextShard]

    @classmethod
    def of(cls, sequences: PackedBatch, groups: ProcessGroups, device: torch.device) -> MicroBatch:
        """These sequences, padded. Without any it is padding alone, and takes part in every collective all the same."""
        layout = groups.layout
        sequence_multiple = 2 * layout.cp if layout.cp > 1 else 1  # zig-zag
        padded, real = sequences.padded(sequence_multiple, total_multiple=token_cuts(layout))
        context = context_shard(padded.cu_seqlens, groups.cp, device)
        return cls(padded.to(device), padded.cu_seqlens, real.to(device), context)


def token_cuts(layout: ParallelLayout) -> int:
    """Parts into which the activations of a micro-batch are cut between the layers' matrix products."""
    return layout.cp * (layout.tp if layout.sequence_parallel else 1)


# (micro-batch, output of the last stage) -> what Megatron's schedules take: loss, token count, reported values
ComputeLoss = Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor, dict]]


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
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
        seq_length=micro_batches[0].batch.num_tokens,
        micro_batch_size=1,
        forward_only=forward_only,
        pg_collection=groups.collection,
    )
    if layout.pp > 1:
        tokens = [micro.batch.num_tokens // token_cuts(layout) for micro in micro_batches]
        common["p2p_communicator"] = PlannedCommunicator(groups.pp, config, tokens)
    if layout.vpp > 1:
        iterators = [iter(micro_batches) for _ in chunks]
        forward_backward_pipelining_with_interleaving(data_iterator=iterators, model=list(chunks), **common)
        return
    schedule = forward_backward_pipelining_without_interleaving if layout.pp > 1 else forward_backward_no_pipelining
    schedule(data_iterator=iter(micro_batches), model=chunks[0], **common)
