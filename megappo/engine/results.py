"""Results of the micro-batches of a pass, combined over micro-batches and ranks, for every engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.data.packing import PackedBatch
from megappo.engine.base import LossOutput


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
            index = share.token_index(list(sequences)).to(device)
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
    return dict(zip(sum_names, sums.tolist())), dict(zip(maximum_names, maxima.tolist()))


def names_of(output: LossOutput) -> dict[str, list[str]]:
    # Sorted: an order that all ranks share.
    return {kind: sorted(getattr(output, kind)) for kind in ("tokens", "sums", "maxima")}
