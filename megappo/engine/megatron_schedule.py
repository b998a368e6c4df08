"""Pipeline schedules of Megatron-core over the micro-batches of one pass, and messages between stages without shape exchange.

Megatron-core exchanges the shape of every tensor first, with a device synchronisation each time; in its interleaved schedule that
can deadlock: a rank that waits for a shape has not yet asked for the tensor that its peer is sending. Every rank of a replica knows
all its micro-batches, so here the shapes follow from the order of the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_schedule_table,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megappo.engine.micro_batches import MicroBatch, MicroBatches, token_cuts
from megappo.parallel.groups import ProcessGroups

Shape = tuple[int, int, int]


# The device is not synchronised after an exchange either (`batch_p2p_sync`, which Megatron keeps for PyTorch before 2.0): NCCL's
# stream waits for the current one when operations are issued, the work's `wait` makes the current stream wait for NCCL's, and torch
# holds the tensors until then. Megatron waits for every work before it returns (no `overlap_p2p_comm`). So a kernel that reads a
# received tensor, or reuses the memory of one that was sent and freed (`deallocate_pipeline_outputs`), runs after the transfer.
class PlannedCommunicator(P2PCommunicator):
    """P2PCommunicator for one pass. tokens: length of this rank's part of every micro-batch, in the order of the pass."""

    def __init__(self, group: dist.ProcessGroup, config: TransformerConfig, tokens: Sequence[int]) -> None:
        assert config.variable_seq_lengths, "with fixed lengths Megatron does not ask for shapes"
        super().__init__(pp_group=group, config=config)
        self._hidden_size = config.hidden_size
        vpp = config.virtual_pipeline_model_parallel_size or 1
        table = get_schedule_table(len(tokens), vpp, config.microbatch_group_size_per_vp_stage)
        # The first stage receives no input of the first chunk, the last stage no gradient of the last one, which comes first.
        is_first, is_last = group.rank() == 0, group.rank() == group.size() - 1
        self._from_previous = iter([tokens[micro] for micro, chunk in table if not (is_first and chunk == 0)])
        self._from_next = iter([tokens[micro] for micro, chunk in table if not (is_last and chunk == 0)])

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        return self._expected(recv_prev, self._from_previous), self._expected(recv_next, self._from_next)

    def _expected(self, wanted: bool, lengths: Iterator[int]) -> Shape | None:
        return (next(lengths), 1, self._hidden_size) if wanted else None


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
    """Run one pass: forward, and backward with gradient reduction unless `forward_only`. Collective over the role's ranks.
    compute_loss runs on the last stage, in order of the micro-batches. chunks: this rank's model chunks, in DDP if they train."""
    layout = groups.layout
    config = cast(TransformerConfig, chunks[0].config)  # to the type checker a chunk is any module

    def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable]:
        micro = next(iterator)
        inputs = micro.batch.tokens, micro.batch.host_offsets, micro.context, micro.real, micro.routes
        return model(*inputs), partial(compute_loss, micro)

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
