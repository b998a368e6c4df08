"""Context parallelism: the tokens of a packed micro-batch on each rank, and the exchange of per-token values. Each sequence is cut
into 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r (zig-zag, as in TransformerEngine), so all ranks have equal work under
a causal mask. Token ids, fields and losses stay whole on every rank; only activations are cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def zigzag_index(cu_seqlens: Tensor, cp: int, cp_rank: int) -> Tensor:
    """Return [T / cp] int64: tokens of a rank, sequence by sequence, its early chunk before its late one. cu_seqlens: [B+1] offsets
    of sequences whose lengths are multiples of 2 cp."""
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.long().diff()
    assert not (lengths % (2 * cp)).any(), f"context parallel {cp} needs sequences padded to a multiple of {2 * cp} tokens"
    mine = lengths // cp  # tokens of each sequence on one rank
    first_of_mine = mine.cumsum(0) - mine
    start, chunk, first = (x.repeat_interleave(mine) for x in (starts, lengths // (2 * cp), first_of_mine))
    offset = torch.arange(start.numel(), device=start.device) - first
    late = offset >= chunk  # in the second of the rank's two chunks
    return start + torch.where(late, (2 * cp - 2 - cp_rank) * chunk, cp_rank * chunk) + offset


@dataclass(frozen=True)
class ContextShard:
    """Part of one micro-batch of T tokens on this rank."""

    group: dist.ProcessGroup
    size: int
    rank: int
    index: Tensor
    """[T / cp] int64, packed position of each token of this rank."""
    order: Tensor
    """[T] int64, position of each token in the concatenated parts of ranks 0..cp-1."""
    ranked: Tensor
    """[T] int64, packed position of each token of that concatenation (inverse of `order`)."""

    def take(self, x: Tensor) -> Tensor:
        """Slice [T, ...], equal on every rank of the group, to this rank's [T / cp, ...]."""
        return x.index_select(0, self.index)

    def gather(self, x: Tensor) -> Tensor:
        """Gather [T / cp, ...] to [T, ...] in packed order on every rank. Collective; differentiable."""
        return _Gather.apply(x, self)

    def heads_from_tokens(self, x: Tensor) -> Tensor:
        """Exchange [T / cp, heads, dim] of this rank's tokens for [T, heads / cp, dim] of this rank's heads. Collective;
        differentiable."""
        return _HeadsFromTokens.apply(x, self)

    def tokens_from_heads(self, x: Tensor) -> Tensor:
        """Exchange [T, heads / cp, dim] for [T / cp, heads, dim], the inverse of `heads_from_tokens`. Collective;
        differentiable."""
        return _TokensFromHeads.apply(x, self)


def context_shard(cu_seqlens: Tensor, group: dist.ProcessGroup, device: torch.device) -> ContextShard | None:
    """Return this rank's part in `group`, with tensors on `device`; None if the group is this rank alone."""
    size, rank = group.size(), group.rank()
    if size == 1:
        return None
    parts = [zigzag_index(cu_seqlens, size, r) for r in range(size)]
    ranked = torch.cat(parts)
    order = torch.empty_like(ranked)
    order[ranked] = torch.arange(ranked.numel(), device=ranked.device)
    return ContextShard(group, size, rank, parts[rank].to(device), order.to(device), ranked.to(device))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: ContextShard) -> Tensor:
        ctx.shard = shard
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(shard.size)]
        dist.all_gather(parts, x.contiguous(), group=shard.group)
        return torch.cat(parts).index_select(0, shard.order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Every rank computes the same loss from the whole, so its slice of the gradient is complete: no sum over ranks.
        return ctx.shard.take(grad), None


class _HeadsFromTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: ContextShard) -> Tensor:
        ctx.shard = shard
        return _heads_from_tokens(x, shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _tokens_from_heads(grad, ctx.shard), None


class _TokensFromHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: ContextShard) -> Tensor:
        ctx.shard = shard
        return _tokens_from_heads(x, shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _heads_from_tokens(grad, ctx.shard), None


def _heads_from_tokens(x: Tensor, shard: ContextShard) -> Tensor:
    tokens, heads, dim = x.shape
    # [cp, T / cp, heads / cp, dim]: block r goes to rank r.
    blocks = x.view(tokens, shard.size, heads // shard.size, dim).transpose(0, 1).contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=shard.group)
    return received.flatten(0, 1).index_select(0, shard.order)


def _tokens_from_heads(x: Tensor, shard: ContextShard) -> Tensor:
    tokens, heads, dim = x.shape
    blocks = x.index_select(0, shard.ranked)
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=shard.group)
    # heads is already heads / cp here; block r has the heads of rank r.
    received = received.view(shard.size, tokens // shard.size, heads, dim)
    return received.transpose(0, 1).reshape(tokens // shard.size, shard.size * heads, dim)
