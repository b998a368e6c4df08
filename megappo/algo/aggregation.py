"""Weights that turn token losses into one number: sum over all ranks and micro-batches of weight * token loss, over the total
count. The weights depend on the sequence alone and the counts add, so neither the split into micro-batches nor the layout changes
the loss. Arithmetic on tokens on the host is in chunks, whose temporaries stay in the cache of a core: memory that a process
touches for the first time costs more than the arithmetic on it, 2 ns for a number of 4 bytes. A device has no such cache, and every
chunk would be a launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

TOKENS = 1 << 15


def true_positions(mask: Tensor) -> Tensor:
    """Ascending positions of the true entries of mask [T], bool; [n] int64. On a device the host waits for their number."""
    if mask.device.type != "cpu":
        return mask.nonzero().flatten()
    return torch.from_numpy(numpy.flatnonzero(mask.numpy()))  # a quarter of the time of torch's `nonzero`


def in_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of consecutive tokens of all tensors [T, ...]; one empty view of each if there are no tokens, and one of all tokens on
    a device."""
    size = TOKENS if tensors[0].device.type == "cpu" else max(1, len(tensors[0]))
    yield from zip(*(x.split(size) for x in tensors), strict=True)


LONG = 2048  # mean tokens of a sequence from which on a sum of each takes less than a running sum of all
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-length")


class TokenWeights(NamedTuple):
    """Weights of the tokens of a batch, and its share of the denominator."""

    weight: Tensor
    """[T] fp32, 0 where the mask is false."""
    count: float
    """Share of this batch in the global denominator."""


def tokens_per_sequence(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Number of true entries of mask [T] in each sequence, [B] int64."""
    return sums_per_sequence(mask, cu_seqlens, torch.long)


def sums_per_sequence(values: Tensor, cu_seqlens: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of values [T] over each sequence, [B] in `dtype`."""
    if values.device.type != "cpu":  # no border is read on the host
        return torch.nn.functional.pad(values.to(dtype).cumsum(0), (1, 0))[cu_seqlens.long()].diff()
    if len(values) > LONG * (len(cu_seqlens) - 1):
        return torch.stack([part.sum(dtype=dtype) for part in values.split(cu_seqlens.diff().tolist())])
    # Short sequences: differences of a running sum.
    ends = cu_seqlens.long()
    at_ends = torch.zeros(ends.numel(), dtype=dtype, device=values.device)
    carried, start = at_ends.new_zeros(()), 0
    for (chunk,) in in_chunks(values):
        running = chunk.to(dtype, copy=True)
        running[:1] += carried
        running.cumsum_(0)
        first, last = torch.searchsorted(ends, ends.new_tensor([start, start + len(chunk)]), right=True).tolist()
        at_ends[first:last] = running[ends[first:last] - start - 1]
        carried, start = running[-1:].sum(), start + len(chunk)
    return at_ends.diff()


def token_weights(mode: str, mask: Tensor, cu_seqlens: Tensor, max_tokens: int | None = None) -> TokenWeights:
    """Weights and count of a packed batch of whole sequences. mask: [T] bool, cu_seqlens: [B+1].

    token-mean            every token counts the same: weight 1, count = tokens (DAPO)
    seq-mean-token-mean   every sequence counts the same: weight 1/length, count = sequences (GRPO)
    seq-mean-token-sum    weight 1, count = sequences
    fixed-length          weight 1, count = sequences * max_tokens (Dr. GRPO)

    A sequence without a true mask entry has weight 0 and is not counted. Raises ValueError for another mode or a missing
    `max_tokens`.
    """
    count = loss_count(mode, tokens_per_sequence(mask, cu_seqlens), max_tokens)
    return TokenWeights(weight_of_tokens(mode, mask, cu_seqlens), count)


def weight_of_tokens(mode: str, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Weights of `token_weights`, [T] fp32."""
    weight = mask.float()
    if mode == "seq-mean-token-mean":
        per_sequence = tokens_per_sequence(mask, cu_seqlens).clamp(min=1).float().reciprocal()
        spans = cu_seqlens.diff().long()
        weight = weight * torch.repeat_interleave(per_sequence, spans, output_size=mask.numel())
    return weight


def loss_count(mode: str, sampled: Tensor, max_tokens: int | None = None) -> float:
    """Share of a batch in the denominator of its loss, as in `token_weights`. sampled: [B] sampled tokens of each sequence."""
    if mode not in AGGREGATIONS:
        raise ValueError(f"loss aggregation {mode!r} is not one of {', '.join(AGGREGATIONS)}")
    if mode == "token-mean":
        return float(sampled.sum())
    sequences = float((sampled > 0).sum())
    if mode != "fixed-length":
        return sequences
    if not max_tokens:
        raise ValueError("loss aggregation fixed-length needs max_tokens, the longest response")
    return sequences * max_tokens
