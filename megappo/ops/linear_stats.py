"""Statistics of `vocab_stats` and their gradients from hidden states and the output weight, block by block (`linear_blocks.py`).

    torch.ops.megappo.linear_stats     hidden[T, H], weight[Vl, H] -> stats[T, 4], logits[T, num_valid] | empty
    torch.ops.megappo.linear_dlogits   ...                         -> dlogits[T, Vl] of a block, from recomputed logits
    torch.ops.megappo.linear_backward  ...                         -> dhidden[T, H] of this shard, dweight[Vl, H]

The backward recomputes the logits (4 products in all) or takes those that the forward kept (3). Fused kernels replace the first
two under the same schema: `triton/linear_stats.py`, and `cuda/linear_stats.py` on Hopper. They call the references for cases that
they do not cover.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megappo.ops.dispatch import op_around
from megappo.ops.gemm import add_mm_
from megappo.ops.linear_blocks import LinearLogits, merge_blocks
from megappo.ops.vocab_stats import Upstream, compute_dtype


def stats_in_blocks(problem: LinearLogits, want_entropy: bool, keep_logits: bool, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Compute `linear_stats` by matrix products and `vocab_stats`: of each block, or of whole rows where the logits are kept."""
    hidden, weight = problem.hidden, problem.weight
    blocks_of_tokens, blocks_of_columns = problem.blocks(chunk_tokens)
    kept_logits = hidden.new_empty(_kept_shape(hidden, problem.num_valid, keep_logits), dtype=problem.dtype)
    stats = hidden.new_empty(max(len(blocks_of_columns), 1), problem.num_tokens, 4, dtype=compute_dtype(hidden.dtype))
    if not blocks_of_columns:  # a shard of padding alone
        # m and z_y; s and t are 0.
        stats.zero_()[:, :, ::3] = -torch.inf
    h = problem.operand(hidden)
    for b, columns in enumerate(blocks_of_columns):
        w = problem.operand(weight[columns])
        for tokens in blocks_of_tokens:
            # Without a name for the logits: those of the block before would live until the next ones are there.
            if keep_logits:
                kept_logits[tokens, columns] = problem.logits(h[tokens], w, tokens, columns)
            else:
                stats[b, tokens] = problem.stats(problem.logits(h[tokens], w, tokens, columns), tokens, columns, want_entropy)
    if keep_logits:
        return problem.stats(kept_logits, slice(None), slice(0, problem.num_valid), want_entropy), kept_logits
    return merge_blocks(stats), kept_logits


def _kept_shape(hidden: Tensor, num_valid: int, keep_logits: bool) -> tuple[int, int]:
    return (hidden.shape[0], num_valid) if keep_logits else (0, 0)


@op_around("vocab_stats")
def linear_stats(problem: LinearLogits, want_entropy: bool, keep_logits: bool, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Compute (stats [T, 4] of hidden @ weight.T as `vocab_stats` defines them, logits), by matrix products and `vocab_stats`: of
    each block, or of whole rows where the logits are kept.

    keep_logits: also return logits [T, num_valid] for `linear_backward`, rounded and restricted, before temperature; else [0, 0].
    chunk_tokens: most tokens in a block, 0 for the device's default.
    """
    return stats_in_blocks(problem, want_entropy, keep_logits, chunk_tokens)


@linear_stats.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    *given, _, keep_logits, _ = arguments
    problem = LinearLogits(*given)
    stats = problem.hidden.new_empty((problem.num_tokens, 4), dtype=compute_dtype(problem.hidden.dtype))
    return stats, problem.hidden.new_empty(_kept_shape(problem.hidden, problem.num_valid, keep_logits), dtype=problem.dtype)


def dlogits_in_steps(problem: LinearLogits, upstream: Upstream) -> Tensor:
    """Compute `linear_dlogits` by a matrix product and `vocab_logits_backward`."""
    whole = slice(0, problem.num_tokens), slice(0, problem.num_valid)
    logits = problem.logits(problem.operand(problem.hidden), problem.operand(problem.weight), *whole)
    return problem.dlogits(logits, *whole, upstream, own=True)


@op_around("vocab_logits_backward")
def linear_dlogits(problem: LinearLogits, upstream: Upstream) -> Tensor:
    """Compute the gradient [T, Vl] of the logits hidden @ weight.T, in the inputs' dtype. The weight is all vocabulary."""
    return dlogits_in_steps(problem, upstream)


@linear_dlogits.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return hidden.new_empty((hidden.shape[0], weight.shape[0]))


@op_around("vocab_logits_backward")
def linear_backward(problem: LinearLogits, upstream: Upstream, logits: Tensor | None, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Compute (dhidden [T, H], this shard's part of the sum over shards; dweight [Vl, H], padding rows 0), in the inputs' dtypes.
    upstream: [T] as merged over all shards. logits: as `linear_stats` kept them, None to recompute them. Both gradients are summed
    over their blocks in fp32."""
    dweight = problem.weight.new_empty(problem.weight.shape)
    dweight[problem.num_valid if problem.num_tokens else 0 :] = 0  # what no block reaches
    return backward_in_blocks(problem, upstream, logits, chunk_tokens, dweight, add=False), dweight


@linear_backward.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def backward_in_blocks(
    problem: LinearLogits, upstream: Upstream, logits: Tensor | None, chunk_tokens: int, dweight: Tensor | None, *, add: bool
) -> Tensor:
    """Compute dhidden of `linear_backward`, and write the weight's gradient to `dweight` [Vl, H] of any type.
    add: the products add to a `dweight` of the compute type (an optimizer's fp32 accumulator). dweight None: the weight is
    frozen."""
    hidden, weight = problem.hidden, problem.weight
    blocks_of_tokens, blocks_of_columns = problem.blocks(chunk_tokens)
    # Sums in fp32: in bf16 the sum of 64 chunks has six times the error of one rounding.
    dtype = compute_dtype(weight.dtype)
    dhidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    # one block of tokens needs no fp32 sum: its product is rounded to the weight's type once, as the sum would be
    direct = dweight is not None and (dweight.dtype == dtype or (dweight.dtype == weight.dtype and len(blocks_of_tokens) == 1))
    h = problem.operand(hidden) if logits is None else hidden
    for b, columns in enumerate(blocks_of_columns):
        w = problem.operand(weight[columns]) if logits is None else weight[columns]
        total = None
        if dweight is not None:
            total = dweight[columns] if direct else torch.zeros(w.shape, dtype=dtype, device=w.device)
        for i, tokens in enumerate(blocks_of_tokens):
            # Kept logits may be read by a second backward.
            kept = None if logits is None else logits[tokens, columns]
            dlogits = _dlogits(problem, kept, h[tokens], w, tokens, columns, upstream.at(tokens))
            add_mm_(dhidden[tokens], dlogits, weight[columns], first=b == 0, exact=False)
            if total is not None:
                add_mm_(total, dlogits.t(), hidden[tokens], first=i == 0 and not add)
        if dweight is not None and total is not None and not direct:
            dweight[columns] = total
    return dhidden.to(hidden.dtype)


def _dlogits(
    problem: LinearLogits, kept: Tensor | None, hidden: Tensor, weight: Tensor, tokens: slice, columns: slice, upstream: Upstream
) -> Tensor:
    """dlogits [t, c] of a block, of its kept logits or of those of its operands."""
    if kept is not None:
        return problem.dlogits(kept, tokens, columns, upstream, own=False)
    if not hidden.is_cuda:  # the operands are widened once for all blocks, which the op could not do
        return problem.dlogits(problem.logits(hidden, weight, tokens, columns), tokens, columns, upstream, own=True)
    start, num_valid = problem.vocab_start + columns.start, columns.stop - columns.start
    part = problem.at(tokens)._replace(hidden=hidden, weight=weight, vocab_start=start, num_valid=num_valid)
    return torch.ops.megappo.linear_dlogits(*part, *upstream)
