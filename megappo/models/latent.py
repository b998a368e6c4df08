"""Multi-head latent attention (DeepSeek-V2 and V3, Kimi K2) over packed sequences, for any tp and sequence parallelism.

Megatron-core's MLASelfAttention is not used: without TransformerEngine it cuts the down projections over tp and fails at tp 2, and
every layer makes rotary tables of its own. The names of the parameters are Megatron's. Every tp rank has the down projections,
which are small, whole; the up projections are cut by heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint, copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megappo.models.arch import LATENT_EPS, Latent
from megappo.models.attention import PackedAttention, PackedSequences
from megappo.models.rope import deinterleaved, rotate


@dataclass
class LatentSubmodules:
    """Classes of the projections that tp cuts, and of the norms."""

    column: Any
    row: Any
    norm: Any


class Whole(torch.nn.Module):
    """A projection that every tp rank has whole; under sequence parallel it sees its rank's tokens. It returns what Megatron's
    linears do: x [..., in] -> ([..., out], no bias)."""

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device))
        # finalize_model_grads sums the partial gradients of marked weights over the tp group.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.nn.functional.linear(x, self.weight), None


class LatentAttention(torch.nn.Module):
    """In the place of a layer's self-attention. scale: of the scores."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LatentSubmodules,
        layer_number: int,
        *,
        latent: Latent,
        scale: float,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,  # of Megatron's own attention under context parallel
        name: str | None = None,  # of the module, since Megatron-core 0.19
    ) -> None:
        super().__init__()
        self.latent, self.tp, self.sequence_parallel = latent, pg_collection.tp, config.sequence_parallel
        self.recomputes = config.recompute_granularity == "selective"
        hidden, heads = config.hidden_size, config.num_attention_heads
        settings: dict[str, Any] = dict(
            config=config, init_method=config.init_method, bias=False, skip_bias_add=True, is_expert=False, tp_group=self.tp
        )
        column = partial(submodules.column, gather_output=False, **settings)
        if latent.q_rank is None:
            self.linear_q_proj = column(hidden, heads * (latent.nope + latent.rope))
        else:
            self.linear_q_down_proj = Whole(hidden, latent.q_rank, config)
            self.q_layernorm = submodules.norm(config=config, hidden_size=latent.q_rank, eps=LATENT_EPS)
            self.linear_q_up_proj = column(latent.q_rank, heads * (latent.nope + latent.rope))
        self.linear_kv_down_proj = Whole(hidden, latent.kv_rank + latent.rope, config)
        self.kv_layernorm = submodules.norm(config=config, hidden_size=latent.kv_rank, eps=LATENT_EPS)
        self.linear_kv_up_proj = column(latent.kv_rank, heads * (latent.nope + latent.value))
        self.core_attention = PackedAttention(config, layer_number, AttnMaskType.causal, "self", softmax_scale=scale, rotated=True)
        self.linear_proj = submodules.row(heads * latent.value, hidden, input_is_parallel=True, **settings)

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: PackedSequences, **_: Any
    ) -> tuple[Tensor, None]:
        """[T, 1, H] -> ([T, 1, H], no bias); this rank's tokens under context and sequence parallel."""
        attend = partial(self.core_attention, packed_seq_params=packed_seq_params)
        heads = self._heads(hidden_states, packed_seq_params)
        recomputes = self.recomputes and self.training
        out: Tensor = checkpoint(attend, False, *heads) if recomputes else attend(*heads)
        return self.linear_proj(out[:, None])

    def _heads(self, hidden_states: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor, Tensor]:
        """[T, 1, H] -> rotated queries and keys [T, heads / tp, nope + rope], values [T, heads / tp, value]; the T of a tp rank's
        attention."""
        _, kv_rank, nope, rope, value_dim = self.latent
        if self.latent.q_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)[0]))
        compressed, position = self.linear_kv_down_proj(hidden_states)[0].split((kv_rank, rope), dim=-1)
        up, _ = self.linear_kv_up_proj(self.kv_layernorm(compressed))
        # One key for the heads of all ranks: its gradient is the sum of theirs.
        if self.sequence_parallel:
            position = gather_from_sequence_parallel_region(position, group=self.tp)
        else:
            position = copy_to_tensor_model_parallel_region(position, group=self.tp)
        tokens = query.size(0)
        q_plain, q_turned = query.view(tokens, -1, nope + rope).split((nope, rope), dim=-1)
        k_plain, value = up.view(tokens, -1, nope + value_dim).split((nope, value_dim), dim=-1)
        assert packed.cos is not None and packed.sin is not None
        q_turned, k_turned = (rotate(deinterleaved(x), packed.cos, packed.sin) for x in (q_turned, position))
        query = torch.cat((q_plain, q_turned), dim=-1)
        key = torch.cat((k_plain, k_turned.expand(-1, k_plain.size(1), -1)), dim=-1)
        return query, key, value
