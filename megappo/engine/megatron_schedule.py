"""Pipeline schedules of Megatron-core over the micro-batches of one pass.

`megatron.py` assigns sequences to micro-batches and handles the model's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megappo.engine.megatron_p2p import PlannedCommunicator
from megappo.engine.micro_batches import MicroBatch, MicroBatches, token_cuts
from megappo.parallel.groups import ProcessGroups

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
    """Run one pass: forward, and backward with gradient reduction unless `forward_only`.

    compute_loss runs on the last stage, in order of the micro-batches. chunks: this rank's model chunks, wrapped in DDP if they
    train. Collective over the role's ranks.
    """
    layout = groups.layout
    config = cast(TransformerConfig, chunks[0].config)  # the chunks' type is that of any module, whose attributes have none

    def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable]:
        micro = next(iterator)
        return model(micro.batch.tokens, micro.cu_seqlens, micro.context, micro.real), partial(compute_loss, micro)

    common: dict[str, Any] = dict(
        forward_step_func=forward_step,
        num_microbatches=len(micro_batches),
        # Read only for fixed shapes; the communicator knows the lengths.
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
