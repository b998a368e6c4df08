"""The statistics of `vocab_stats` straight from hidden states, in chunks of tokens, so that [T, Vl] logits never exist.

    torch.ops.megappo.linear_stats            hidden[T, H], weight[Vl, H] -> stats[T, 4]
    torch.ops.megappo.linear_logprob_backward ...                        -> dhidden[T, H] of this shard, dweight[Vl, H] fp32

Logits are fp32 whatever the weights are (staging them in bf16 costs up to 0.16 in a log-prob) and are computed again in the
backward. Reference implementations: a GEMM per chunk and the row operations of `vocab_stats.py`.

bf16_logits rounds the logits to bf16 before anything else, as an inference engine whose output layer computes in bf16 does; the
gradient passes straight through the rounding. kept: see `kept_ids.py`.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from megappo.ops.kept_ids import restrict_
from megappo.ops.vocab_stats import compute_dtype


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with the products summed and returned in fp32 (fp64 for fp64)."""
    if a.dtype == compute_dtype(a.dtype):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _logits(
    hidden: Tensor, valid: Tensor, kept: Optional[Tensor], vocab_start: int, bf16_logits: bool
) -> Tensor:
    """[t, num_valid] of one chunk: fp32, or rounded to bf16 (bf16 weights: as bf16, others: in their own compute type)."""
    logits = _matmul(hidden, valid.t())
    if bf16_logits:
        logits = logits.bfloat16()
        if valid.dtype != torch.bfloat16:  # dlogits come out in the type of the logits
            logits = logits.to(compute_dtype(valid.dtype))
    return logits if kept is None else restrict_(logits, kept, vocab_start)


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens)]


def _rows(tensor: Optional[Tensor], chunk: slice) -> Optional[Tensor]:
    return None if tensor is None else tensor[chunk]


@torch.library.custom_op("megappo::linear_stats", mutates_args=())
def linear_stats(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start: int,
    num_valid: int,
    inv_temp: float,
    row_inv_temp: Optional[Tensor],
    ignore_index: int,
    want_entropy: bool,
    kept: Optional[Tensor],
    bf16_logits: bool,
    chunk_tokens: int,
) -> Tensor:
    """vocab_stats(hidden @ weight.T): hidden [T, H], weight [Vl, H] of one dtype; other arguments and the result as there."""
    stats = hidden.new_empty(hidden.shape[0], 4, dtype=compute_dtype(hidden.dtype))
    valid = weight[:num_valid]
    for chunk in _chunks(hidden.shape[0], chunk_tokens):
        logits = _logits(hidden[chunk], valid, _rows(kept, chunk), vocab_start, bf16_logits)
        stats[chunk] = torch.ops.megappo.vocab_stats(
            logits, target[chunk], vocab_start, num_valid, inv_temp, _rows(row_inv_temp, chunk), ignore_index, want_entropy
        )
    return stats


@linear_stats.register_fake
def _(hidden, weight, target, vocab_start, num_valid, inv_temp, row_inv_temp, ignore_index, want_entropy, kept, bf16_logits, chunk_tokens):
    return hidden.new_empty((hidden.shape[0], 4), dtype=compute_dtype(hidden.dtype))


@torch.library.custom_op("megappo::linear_logprob_backward", mutates_args=())
def linear_logprob_backward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    entropy: Tensor,
    g_logprob: Tensor,
    g_entropy: Optional[Tensor],
    vocab_start: int,
    num_valid: int,
    inv_temp: float,
    row_inv_temp: Optional[Tensor],
    ignore_index: int,
    kept: Optional[Tensor],
    bf16_logits: bool,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """(dhidden [T, H] in hidden's dtype, this shard's part of the sum over shards; dweight [Vl, H] in fp32, padding rows 0).

    dweight sums its chunks in fp32: in bf16 the sum over 64 chunks has six times the error of one rounding.
    """
    dhidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    dweight = torch.zeros(weight.shape, dtype=compute_dtype(weight.dtype), device=weight.device)
    valid, dvalid = weight[:num_valid], dweight[:num_valid]
    for chunk in _chunks(hidden.shape[0], chunk_tokens):
        h = hidden[chunk]
        logits = _logits(h, valid, _rows(kept, chunk), vocab_start, bf16_logits)
        dlogits = torch.ops.megappo.vocab_logits_backward(
            logits, target[chunk], lse[chunk], entropy[chunk], g_logprob[chunk], _rows(g_entropy, chunk),
            vocab_start, num_valid, inv_temp, _rows(row_inv_temp, chunk), ignore_index,
        ).to(weight.dtype)
        dhidden[chunk] = dlogits @ valid
        dvalid += _matmul(dlogits.t(), h)
    return dhidden, dweight


@linear_logprob_backward.register_fake
def _(hidden, weight, target, lse, entropy, g_logprob, g_entropy, *args):
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape, dtype=compute_dtype(weight.dtype))
