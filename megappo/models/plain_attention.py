"""Packed causal attention with scores in memory, for capped scores and attention sinks, which fused kernels do not have.

Runs on any device; memory grows with the square of the longest sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.models.attention import Grouping, pad, unpad


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grouping: Grouping,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `grouped_attention` with scores capped at `softcap`, and a sink [heads] for each query head. Softmax in fp32.
    query [T, heads, dim], key and value [T, kv_heads, dim] -> [T, heads, dim]."""
    if not grouping.groups:
        return query.new_zeros(query.shape)
    padded = [pad(x, grouping) for x in (query, key, value)]
    outputs = []
    for group in grouping.groups:
        rows = group.num_sequences * group.length
        q, k, v = (x.narrow(0, group.start, rows).view(group.num_sequences, group.length, *x.shape[1:]) for x in padded)
        out = _attend(q, k, v, scale, window, softcap, sinks)
        outputs.append(out.reshape(rows, *query.shape[1:]))
    return unpad(torch.cat(outputs), grouping)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend sequences of one length: q [B, L, heads, dim], k and v [B, L, kv_heads, dim] -> [B, L, heads, dim]."""
    sequences, length, heads, dim = q.shape
    shared = heads // k.size(2)  # query heads of a KV head, which is not repeated
    q = q.view(sequences, length, k.size(2), shared, dim)
    scores = torch.einsum("bikgd,bjkd->bkgij", q, k).float() * scale
    if softcap is not None:  # Gemma 2
        scores = torch.tanh(scores / softcap) * softcap
    ones = torch.ones(length, length, dtype=torch.bool, device=q.device)
    visible = ones.tril() if window is None else ones.tril().triu(1 - window)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:  # gpt-oss: a score of each head that takes a share of the softmax and adds no value
        sink = sinks.float().view(1, k.size(2), shared, 1, 1).expand(sequences, -1, -1, length, 1)
        scores = torch.cat([scores, sink], dim=-1)
    shares = scores.softmax(dim=-1)[..., :length].to(v.dtype)
    return torch.einsum("bkgij,bjkd->bikgd", shares, v).reshape(sequences, length, heads, dim)
