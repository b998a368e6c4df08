"""Messages between pipeline stages whose micro-batches differ in length.

Megatron-core exchanges the shape of every tensor before the tensor, with a device synchronisation each time; in its
interleaved schedule that exchange can also deadlock, because a rank that waits for its peer's shape has not yet asked for the
tensor that the peer is sending. Every rank of a replica knows all its micro-batches, so here the shapes follow from the order of
the schedule.

Nor is the device synchronised after the exchange (`batch_p2p_sync`, which Megatron keeps for PyTorch before 2.0, whose batched
operations did not order streams): NCCL's stream waits for the current one when the operations are issued, the work's `wait`
makes the current stream wait for NCCL's, and torch holds the tensors until then. Megatron waits for every work before it returns
(no `overlap_p2p_comm`). So a kernel that reads a received tensor, or reuses the memory of one that was sent and freed
(`deallocate_pipeline_outputs`), is queued behind the transfer, and the host runs ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer import TransformerConfig
from torch import Tensor

Shape = tuple[int, int, int]


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
        """Shapes of the tensors from the previous and the next stage, without communication."""
        return self._expected(recv_prev, self._from_previous), self._expected(recv_next, self._from_next)

    def _expected(self, wanted: bool, lengths: Iterator[int]) -> Shape | None:
        return (next(lengths), 1, self._hidden_size) if wanted else None
