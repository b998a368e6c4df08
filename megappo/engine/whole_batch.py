"""A pass over a batch that every rank of a role holds in whole, for instruments and tests; a training step never does this."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
import torch.distributed as dist

from megappo.data.packing import PackedBatch
from megappo.engine.base import Engine, PassResult
from megappo.engine.losses import LossFunction
from megappo.parallel.shares import partition_balanced


def pass_whole_batch(
    engine: Engine,
    batch: PackedBatch,
    loss_fn: LossFunction,
    *,
    reads: Collection[str] = (),
    denominator: float = 1.0,
    forward_only: bool = False,
) -> PassResult:
    """Run `Engine.forward_backward` on this rank's share of the batch; per-token results are of the whole batch, on every rank.
    batch: the same on every rank of the role; its sequences are balanced over the shares by tokens. Collective over the role."""
    shares, mine = engine.shares, sequences_of_share(engine, batch)
    result = engine.forward_backward(batch.select(mine), loss_fn, reads=reads, denominator=denominator, forward_only=forward_only)
    if not result.tokens:
        return result
    names = sorted(result.tokens)
    whole = torch.zeros(len(names), batch.num_tokens, dtype=torch.float32, device=batch.tokens.device)
    if dist.get_rank() in shares.reporters:
        whole[:, batch.token_index(mine)] = torch.stack([result.tokens[name] for name in names])
    # Each position is written by exactly one rank, so the sum over ranks adds zeros and keeps the bits.
    dist.all_reduce(whole, group=engine.host_group)
    return replace(result, tokens=dict(zip(names, whole)))


def sequences_of_share(engine: Engine, batch: PackedBatch) -> list[int]:
    """Ascending indices of the sequences of this rank's share. Not collective."""
    rank = dist.get_rank()
    index = engine.shares.index_of(rank)
    assert index is not None, f"the {engine.name} does not live on rank {rank}"
    return partition_balanced(batch.lengths.tolist(), engine.shares.count)[index]
