"""Packed causal attention with scores in memory, for capped scores and attention sinks, which fused kernels do not have.

Runs on any device; memory grows with the square of the longest sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megappo.models.attention import Grouping, PackedAttention, PackedSequences, band, by_length


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
    return by_length((query, key, value), grouping, lambda q, k, v: _attend(q, k, v, scale, window, softcap, sinks))


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
    scores = scores.masked_fill(~band(length, length if window is None else window, q.device), -torch.inf)
    if sinks is not None:  # gpt-oss: a score of each head that takes a share of the softmax and adds no value
        sink = sinks.float().view(1, k.size(2), shared, 1, 1).expand(sequences, -1, -1, length, 1)
        scores = torch.cat([scores, sink], dim=-1)
    shares = scores.softmax(dim=-1)[..., :length].to(v.dtype)
    return torch.einsum("bkgij,bjkd->bikgd", shares, v).reshape(sequences, length, heads, dim)


class SinkAttention(PackedAttention):
    """Core attention with a learned sink for each query head (gpt-oss), cut over tp with the heads."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.sinks = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.sinks, True, 0, 1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        context = packed.context
        sinks = self.sinks if context is None else self.sinks.view(context.size, -1)[context.rank]  # of the exchanged heads
        return plain_attention(query, key, value, packed.grouping(), self.scale, window=self.window, sinks=sinks)
