"""Micro-batches of one pass: cut and padded for a layout, on the device one ahead of the model, and their results combined over
micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.data.packing import ROUTES, PackedBatch, moved, padded_lengths
from megappo.engine.losses import LossOutput
from megappo.parallel.context import ContextShard, context_shard
from megappo.parallel.groups import ProcessGroups
from megappo.parallel.layout import ParallelLayout


def detached(output: LossOutput, real: Tensor) -> LossOutput:
    """Drop the graph and the padding of a micro-batch's results. real: [tokens of its sequences] int64, their positions."""
    return LossOutput(
        tokens={name: value.detach().index_select(0, real) for name, value in output.tokens.items()},
        sums={name: value.detach() for name, value in output.sums.items()},
        maxima={name: value.detach() for name, value in output.maxima.items()},
    )


def in_order(
    share: PackedBatch,
    micro_batches: Sequence[Sequence[int]],
    outputs: Sequence[LossOutput],
    names: Sequence[str],
    device: torch.device,
    *,
    reports: bool,
) -> dict[str, Tensor]:
    """Order per-token results as the share's tokens: [T] fp32 on the share's device; zeros on a rank that does not report.
    micro_batches: the sequences of each, as indices in the share."""
    ordered = torch.zeros(len(names), share.num_tokens, dtype=torch.float32, device=device)
    if reports:
        for sequences, output in zip(micro_batches, outputs):
            index = moved(share.token_index(list(sequences)), device)
            for row, name in enumerate(names):
                ordered[row, index] = output.tokens[name].float()
    return dict(zip(names, ordered.to(share.tokens.device)))


def combined_metrics(
    outputs: Sequence[LossOutput],
    names: Mapping[str, Sequence[str]],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    reports: bool,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return (sums, maxima) of all micro-batches of all replicas. names: by kind, the same on every rank. Collective over the
    group."""
    sum_names, maximum_names = names["sums"], names["maxima"]
    sums = torch.zeros(len(sum_names), dtype=torch.float64, device=device)
    maxima = torch.full((len(maximum_names),), -torch.inf, dtype=torch.float64, device=device)
    for output in outputs if reports else ():
        for row, name in enumerate(sum_names):
            sums[row] += output.sums[name].double()
        for row, name in enumerate(maximum_names):
            maxima[row] = torch.maximum(maxima[row], output.maxima[name].double())
    if sum_names:
        dist.all_reduce(sums, group=group)
    if maximum_names:
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    found = torch.cat((sums, maxima)).tolist()  # at once: the host waits once for the pass
    return dict(zip(sum_names, found)), dict(zip(maximum_names, found[len(sum_names) :]))


def names_of(output: LossOutput) -> dict[str, list[str]]:
    # Sorted: an order that all ranks share.
    return {kind: sorted(getattr(output, kind)) for kind in ("tokens", "sums", "maxima")}


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a data-parallel replica."""

    batch: PackedBatch  # padded as the layout needs
    real: Tensor  # [tokens of its sequences] int64, their positions in `batch`
    context: ContextShard | None  # this rank's tokens under context parallel

    @cached_property
    def routes(self) -> Tensor | None:
        """[T, sparse layers x top_k] int16, as in `PackedSequences`; None if the sampler's choice of no token is known."""
        routes = self.batch.ragged_fields.get(ROUTES)
        return None if routes is None or not routes.width else routes.padded()

    @classmethod
    def of(cls, sequences: PackedBatch, groups: ProcessGroups) -> MicroBatch:
        """Pad these sequences. Without any the result is padding alone, so the rank still takes part in every collective."""
        padded, real = sequences.padded(*padding_multiples(groups.layout))
        return cls(padded, real, context_shard(padded.host_offsets, groups.cp, torch.device("cpu")))

    def to(self, device: torch.device) -> MicroBatch:
        """Copy what is on the host to the device; the copies are queued."""
        context = self.context
        if context is not None:
            context = replace(
                context,
                index=moved(context.index, device),
                order=moved(context.order, device),
                ranked=moved(context.ranked, device),
            )
        return MicroBatch(self.batch.to(device), moved(self.real, device), context)


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
