"""Context parallel: which tokens of a packed micro-batch a rank holds, and how per-token values travel between the ranks.

Each sequence is cut into 2 cp chunks and rank r holds the chunks r and 2 cp - 1 - r (zig-zag, as in TransformerEngine): under a
causal mask all ranks then have the same work. Every rank of the group knows the whole micro-batch (token ids and fields are a
few bytes per token), so targets are made and losses are computed on whole sequences; only activations are cut. What attention
does with this is `models/attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def zigzag_index(cu_seqlens: Tensor, cp: int, cp_rank: int) -> Tensor:
    """[T / cp] int64: the tokens that a rank holds, sequence by sequence, its early chunk before its late one.

    cu_seqlens: [B+1] offsets of sequences whose lengths are multiples of 2 cp.
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.long().diff()
    assert not (lengths % (2 * cp)).any(), f"context parallel {cp} needs sequences padded to a multiple of {2 * cp} tokens"
    mine = lengths // cp
    first_of_mine = mine.cumsum(0) - mine
    start, chunk, first = (x.repeat_interleave(mine) for x in (starts, lengths // (2 * cp), first_of_mine))
    offset = torch.arange(start.numel(), device=start.device) - first
    late = offset >= chunk
    return start + torch.where(late, (2 * cp - 2 - cp_rank) * chunk, cp_rank * chunk) + offset


@dataclass(frozen=True)
class ContextShard:
    """This rank's part of one micro-batch of T tokens.

    index: [T / cp] int64, packed position of each token that this rank holds. order: [T] int64, where each token stands when
    the parts of the ranks 0..cp-1 are laid end to end; ranked: [T] int64, the packed position of each token of that row
    (`order` inverted).
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    index: Tensor
    order: Tensor
    ranked: Tensor

    def take(self, x: Tensor) -> Tensor:
        """[T, ...], the same on every rank of the group -> this rank's [T / cp, ...]."""
        return x.index_select(0, self.index)

    def gather(self, x: Tensor) -> Tensor:
        """[T / cp, ...] -> [T, ...] in packed order on every rank. Collective; differentiable.

        Every rank computes the same loss from the whole, so the gradient of a rank's part is its slice: nothing is added up.
        """
        return _Gather.apply(x, self)

    def heads_from_tokens(self, x: Tensor) -> Tensor:
        """[T / cp, heads, dim], this rank's tokens -> [T, heads / cp, dim], this rank's heads of whole sequences. Collective."""
        return _HeadsFromTokens.apply(x, self)

    def tokens_from_heads(self, x: Tensor) -> Tensor:
        """The way back: [T, heads / cp, dim] -> [T / cp, heads, dim]. Collective."""
        return _TokensFromHeads.apply(x, self)


def context_shard(cu_seqlens: Tensor, group: dist.ProcessGroup, device: torch.device) -> ContextShard | None:
    """The part of this rank of `group`, with its tensors on `device`; None where the group is this rank alone."""
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
    blocks = x.view(tokens, shard.size, heads // shard.size, dim).transpose(0, 1).contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=shard.group)
    return received.flatten(0, 1).index_select(0, shard.order)


def _tokens_from_heads(x: Tensor, shard: ContextShard) -> Tensor:
    tokens, heads, dim = x.shape
    blocks = x.index_select(0, shard.ranked)
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=shard.group)
    received = received.view(shard.size, tokens // shard.size, heads, dim)
    return received.transpose(0, 1).reshape(tokens // shard.size, shard.size * heads, dim)
