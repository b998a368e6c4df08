"""Gated delta net (Qwen3-Next, Qwen3.5; arXiv:2412.06464) over packed sequences, cut by its heads over tp, with sequence parallel.
Under context parallel ranks exchange tokens for key heads and their value heads, as attention does.

Megatron-core's GatedDeltaNet needs flash-linear-attention and a GPU, and refuses packed sequences. Here sequences of like length
are padded on the right, which no token before sees, and the rule runs over chunks of them in torch's own products, on any device.
The attention of the other layers of these models, whose heads' outputs are gated, is here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint, copy_to_tensor_model_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor
from torch.nn.functional import conv1d, rms_norm, silu, softplus
from torch.nn.functional import pad as pad_end

from megappo.models.arch import Delta
from megappo.models.attention import Grouping, PackedSequences, by_length
from megappo.parallel.context import ContextShard

CHUNK = 64
"""Tokens of which a layer solves one triangular system, as in transformers and flash-linear-attention."""
_NORM_EPS = 1e-6  # of queries and keys, in transformers and vLLM whatever rms_norm_eps is


@dataclass
class DeltaSubmodules:
    """Classes of the projections that tp cuts."""

    column: Any
    row: Any


class DeltaNet(torch.nn.Module):
    """In the place of a layer's self-attention."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaSubmodules,
        layer_number: int,
        *,
        delta: Delta,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,  # of Megatron's own attention under context parallel
        name: str | None = None,  # of the module, since Megatron-core 0.19
    ) -> None:
        super().__init__()
        tp = pg_collection.tp
        self.mine = delta._replace(key_heads=delta.key_heads // tp.size(), value_heads=delta.value_heads // tp.size())
        self.recomputes = config.recompute_granularity == "selective"
        settings: dict[str, Any] = dict(
            config=config, init_method=config.init_method, bias=False, skip_bias_add=True, is_expert=False, tp_group=tp
        )
        self._mixed = (self.mine.keys, self.mine.keys, self.mine.values)
        rows = 2 * (delta.keys + delta.values + delta.value_heads)
        self.in_proj = submodules.column(config.hidden_size, rows, gather_output=False, **settings)
        self.conv1d = CausalKernels(sum(self._mixed), delta.width, config)
        self.A_log, self.dt_bias = (_sharded(config, self.mine.value_heads) for _ in range(2))
        self.norm = GatedNorm(delta.value_dim, config, tp)
        self.out_proj = submodules.row(delta.values, config.hidden_size, input_is_parallel=True, **settings)

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: PackedSequences, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] -> ([T, 1, H], no bias); this rank's tokens under context and sequence parallel."""
        mixed, gate, beta, speed = self._parts(self.in_proj(hidden_states)[0].squeeze(1))
        a_log, dt_bias, kernels, context = self.A_log, self.dt_bias, self.conv1d.weight, packed_seq_params.context
        if context is not None:
            mixed, beta, speed = self._of_own_heads(mixed, beta, speed, context)
            a_log, dt_bias = (x.chunk(context.size)[context.rank] for x in (a_log, dt_bias))
            kernels = torch.cat([x.chunk(context.size)[context.rank] for x in kernels.split(self._mixed)])
        # In fp32 in a model of any type, as transformers and vLLM compute it.
        decay = -a_log.float().exp() * softplus(speed.float() + dt_bias.float())
        attend = partial(self._attend, packed_seq_params.grouping())
        inputs = mixed, decay, beta.sigmoid(), kernels
        out: Tensor = checkpoint(attend, False, *inputs) if self.recomputes and self.training else attend(*inputs)
        out = out if context is None else context.tokens_from_heads(out)
        return self.out_proj(self.norm(out, gate.view_as(out)).flatten(1)[:, None])

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Take the projection of T tokens apart: queries, keys and values [T, channels], the output's gate [T, values], and what
        makes the rate of an update and the decay [T, value heads]."""
        mine, tokens = self.mine, rows.size(0)
        keys, values, heads = mine.keys, mine.values, mine.value_heads
        if not mine.by_key_head:
            mixed, gate, beta, speed = rows.split((sum(self._mixed), values, heads, heads), dim=-1)
            return mixed, gate, beta, speed
        projected, scalars = (x.view(tokens, mine.key_heads, -1) for x in rows.split((2 * (keys + values), 2 * heads), dim=-1))
        *mixed, gate = projected.split((mine.key_dim, mine.key_dim, *2 * (values // mine.key_heads,)), dim=-1)
        beta, speed = scalars.chunk(2, dim=-1)
        return torch.cat([part.flatten(1) for part in mixed], dim=-1), gate.flatten(1), beta.flatten(1), speed.flatten(1)

    def _of_own_heads(self, mixed: Tensor, beta: Tensor, speed: Tensor, context: ContextShard) -> tuple[Tensor, ...]:
        """Exchange the parts of this cp rank's tokens for those of all tokens and of its heads: [T / cp, size] -> [T, size / cp].
        Collective."""
        parts = [x.unflatten(1, (self.mine.key_heads, -1)) for x in (*mixed.split(self._mixed, dim=-1), beta, speed)]
        whole = context.heads_from_tokens(torch.cat(parts, dim=-1)).split([x.size(-1) for x in parts], dim=-1)
        *mixed_parts, beta, speed = (x.flatten(1) for x in whole)
        return torch.cat(mixed_parts, dim=-1), beta, speed

    def _attend(self, grouping: Grouping, mixed: Tensor, decay: Tensor, beta: Tensor, kernels: Tensor) -> Tensor:
        """Convolution and rule within each sequence, of all heads or some: [T, ...] -> [T, value heads, value_dim]. kernels: of the
        channels of `mixed`."""
        ranks = self.mine.value_heads // beta.size(1)
        mine = self.mine._replace(key_heads=self.mine.key_heads // ranks, value_heads=beta.size(1))
        if not grouping.groups:
            return mixed.new_zeros(0, mine.value_heads, mine.value_dim)

        def of_group(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
            query, key, value = convolution(x, kernels).split((mine.keys, mine.keys, mine.values), dim=-1)
            query, key = (part.unflatten(-1, (mine.key_heads, mine.key_dim)) for part in (query, key))
            return delta_rule(query, key, value.unflatten(-1, (mine.value_heads, mine.value_dim)), g, b)

        return by_length((mixed, decay, beta), grouping, of_group).to(mixed.dtype)


class CausalKernels(torch.nn.Module):
    """Kernels of `convolution`, weight [channels, width]."""

    def __init__(self, channels: int, width: int, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = _sharded(config, channels, width)


def convolution(x: Tensor, kernels: Tensor) -> Tensor:
    """Convolve every channel with itself over the tokens before, and apply SiLU: [sequences, length, channels] -> the same.
    kernels: [channels, width]."""
    channels, width = kernels.shape
    return silu(conv1d(pad_end(x.transpose(1, 2), (width - 1, 0)), kernels[:, None], groups=channels).transpose(1, 2))


class GatedNorm(torch.nn.Module):
    """RMSNorm of a head, times SiLU of its gate. The weight, no distance from 1, is of all heads, of which a tp rank has some."""

    def __init__(self, size: int, config: TransformerConfig, tp: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=_device(config)))
        self.eps, self.tp, self.sequence_parallel = config.layernorm_epsilon, tp, config.sequence_parallel
        # finalize_model_grads sums the partial gradients of marked weights over the tp group, under sequence parallel alone.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        weight = self.weight if self.sequence_parallel else copy_to_tensor_model_parallel_region(self.weight, group=self.tp)
        normed = rms_norm(x.float(), (x.size(-1),), eps=self.eps).to(x.dtype) * weight
        return (normed * silu(gate.float())).to(x.dtype)


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunk: int = CHUNK) -> Tensor:
    """Apply the gated delta rule to whole sequences: S_t = exp(decay_t) S_{t-1} (1 - beta_t k_t k_t^T) + beta_t v_t k_t^T, and
    S_t q_t is what token t reads, with queries and keys of length 1, the former over the root of their channels.

    query, key [B, L, key heads, key_dim]; value [B, L, value heads, value_dim]; decay, beta [B, L, value heads], decay at most 0.
    -> [B, L, value heads, value_dim] fp32 (fp64 if they are). Computed as in section 3.3 of the paper: of every chunk the updates
    together, by a triangular system, then a pass over the chunks."""
    length, shared, scale = query.size(1), value.size(2) // query.size(2), query.size(-1) ** -0.5
    chunk = min(chunk, length)
    dtype = torch.promote_types(value.dtype, torch.float32)

    def by_chunk(x: Tensor, heads_of_key: int) -> Tensor:
        """[B, L, heads, channels] -> [B, key heads, heads of a key, chunks, chunk, channels]; padding changes nothing."""
        x = pad_end(x.to(dtype).transpose(1, 2), (0, 0, 0, -length % chunk))
        return x.unflatten(1, (-1, heads_of_key)).unflatten(3, (-1, chunk))

    q, k = (by_chunk(x * (x.square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt(), 1) for x in (query.to(dtype), key.to(dtype)))
    v, decay, beta = (by_chunk(x, shared) for x in (value, decay[..., None], beta[..., None]))
    total = decay.cumsum(-2)  # log of what is left, at a token, of the state before the chunk
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    left = (total - total.mT).masked_fill(later, -torch.inf).exp()  # [.., i, j]: at token i of what token j wrote
    updates = torch.cat((v, (k * total.exp()).expand(*v.shape[:-1], -1)), dim=-1) * beta
    updates = torch.linalg.solve_triangular(beta * (k @ k.mT) * left, updates, upper=False, unitriangular=True)
    written, erased = updates.split((v.size(-1), k.size(-1)), dim=-1)
    scores, q = scale * (q @ k.mT) * left, scale * q * total.exp()
    k, left_of_chunk = k * (total[..., -1:, :] - total).exp(), total[..., -1:, :].exp()
    state = v.new_zeros(*v.shape[:3], k.size(-1), v.size(-1))
    outputs = []
    for n in range(v.size(3)):
        new = written[:, :, :, n] - erased[:, :, :, n] @ state
        outputs.append(q[:, :, :, n] @ state + scores[:, :, :, n] @ new)
        state = state * left_of_chunk[:, :, :, n] + k[:, :, :, n].mT @ new
    return torch.cat(outputs, dim=3)[:, :, :, :length].flatten(1, 2).transpose(1, 2)


def _sharded(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Parameter, not filled, whose rows are this tp rank's part."""
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=_device(config)))
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter


def _device(config: TransformerConfig) -> int | None:
    return None if config.use_cpu_initialization else torch.cuda.current_device()


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
