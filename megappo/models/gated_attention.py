"""Attention whose heads' outputs are gated (Qwen3-Next, Qwen3.5), with queries and gates in the order of the checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


class GatedAttention(SelfAttention):
    """SelfAttention whose projection has the rows [query | gate] of each query head of a group, then its key and value.

    Megatron-core has the queries of a group before its gates: of a part of `q_proj` an adapter's rows would be in another order
    than the checkpoint's."""

    # Megatron gives the gate to `_apply_output_gate` if its config says that there is one.
    def get_query_key_value_tensors(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[T, 1, H] -> query [T, 1, heads, dim], key, value [T, 1, KV heads, dim], gate as query; this rank's."""
        groups, dim = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        project: Any = self.linear_qkv
        rows, _bias = project(hidden_states)
        both, key, value = rows.unflatten(-1, (groups, -1, dim)).split(
            (2 * self.num_attention_heads_per_partition // groups, 1, 1), dim=-2
        )
        query, gate = both.flatten(2, 3).unflatten(2, (-1, 2)).unbind(3)
        key, value = key.squeeze(-2), value.squeeze(-2)
        query = query if self.q_layernorm is None else self.q_layernorm(query)
        key = key if self.k_layernorm is None else self.k_layernorm(key)
        return query, key, value, gate

    # Megatron's is compiled at its first call, and computes in fp32.
    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * torch.sigmoid(gate.reshape(x.shape))
