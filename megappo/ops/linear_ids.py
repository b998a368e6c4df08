"""Log-probs of a few ids of each token from hidden states and the output weight, differentiable, over a tensor-parallel group.
`linear_logprob.py` gives that of the first id, and so the normaliser; the logits of the others follow from their rows of the
weight, gathered for a block of tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megappo.ops.linear_blocks import cut
from megappo.ops.linear_logprob import LinearCall, LinearOptions, handed_over, linear_call, linear_logprob, main_grad_of
from megappo.ops.vocab_stats import compute_dtype

# Bytes of the rows of the weight that a block of tokens gathers.
BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}


def linear_logprobs_at(
    hidden: Tensor, weight: Tensor, ids: Tensor, group: dist.ProcessGroup | None, options: LinearOptions
) -> Tensor:
    """Compute the log-probs [T, K] of ids [T, K] int64 in softmax(hidden @ weight.T / temperature), fp32, equal on all ranks of the
    group. Arguments, gradients and errors as of `linear_logprob`, with one temperature for all tokens and fp32 logits; ids are of
    the whole vocabulary. Collective over the group: an all-reduce of the [T, K] logits beside the exchange of one log-prob."""
    call = linear_call(hidden, weight, ids[:, 0], group, options)
    first, _ = linear_logprob(hidden, weight, ids[:, 0].contiguous(), group, options)
    logits = call.shard.inv_temp * _LogitsAt.apply(hidden, weight, ids, call)
    return first[:, None] + (logits - logits[:, :1])


class _LogitsAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, call: LinearCall) -> Tensor:
        rows, (local, own) = call.all_rows(hidden), _local(ids, call)
        found = rows.new_zeros(ids.shape, dtype=compute_dtype(weight.dtype))
        for tokens in _blocks(weight, ids):
            found[tokens] = torch.bmm(_wide(weight[local[tokens]]), _wide(rows[tokens])[:, :, None])[:, :, 0]
        found.masked_fill_(~own, 0.0)
        if call.shard.size > 1:
            dist.all_reduce(found, group=call.shard.group)
        ctx.save_for_backward(hidden, weight, ids)
        ctx.call = call
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ids = ctx.saved_tensors
        call: LinearCall = ctx.call
        rows, (local, own) = call.all_rows(hidden), _local(ids, call)
        upstream = torch.where(own, upstream, 0.0)
        dhidden = rows.new_zeros(rows.shape, dtype=upstream.dtype)
        dweight = None
        if call.into_main_grad:
            dweight = main_grad_of(weight)
        elif ctx.needs_input_grad[1]:
            dweight = weight.new_zeros(weight.shape, dtype=upstream.dtype)
        for tokens in _blocks(weight, ids):
            dhidden[tokens] = torch.bmm(upstream[tokens, None], _wide(weight[local[tokens]]))[:, 0]
            if dweight is not None:
                terms = (upstream[tokens][:, :, None] * _wide(rows[tokens])[:, None]).flatten(0, 1)
                _add_rows_(dweight, local[tokens].flatten(), terms)
        dhidden = call.sum_over_shards(dhidden.to(hidden.dtype))
        if call.into_main_grad:
            return dhidden, handed_over(weight), None, None
        return dhidden, None if dweight is None else dweight.to(weight.dtype), None, None


def _local(ids: Tensor, call: LinearCall) -> tuple[Tensor, Tensor]:
    """Return the rows of this shard's weight, 0 for ids of other shards, and True where the id is this shard's, [T, K] each."""
    local = ids - call.shard.start
    own = (local >= 0) & (local < call.shard.num_valid)
    return torch.where(own, local, 0), own


def _blocks(weight: Tensor, ids: Tensor) -> list[slice]:
    return cut(ids.shape[0], max(1, BLOCK_BYTES["cuda" if weight.is_cuda else "cpu"] // (4 * ids.shape[1] * weight.shape[1])))


def _wide(x: Tensor) -> Tensor:
    return x.to(compute_dtype(x.dtype))


def _add_rows_(total: Tensor, index: Tensor, rows: Tensor) -> None:
    # In an order of its own on each device: a GPU's index_add_ has none, and its index_put_ sorts.
    if total.is_cuda:
        total.index_put_((index,), rows, accumulate=True)
    else:
        total.index_add_(0, index, rows)
