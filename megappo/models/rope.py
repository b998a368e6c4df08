"""Rotary position embedding of packed sequences: frequencies, the table of one micro-batch, and the rotation.

Frequencies are those of transformers, bit for bit. Megatron's rotary modules recompute cos and sin in every layer and cannot
express all of these types.
"""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megappo.data.packing import moved
from megappo.models.arch import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Return ([head_dim / 2] fp32 inverse frequencies, factor on cos and sin)."""
    if rope.type == "default":
        return 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # here: most models do without

    parameters = {**asdict(rope), "rope_theta": rope.theta, "original_max_position_embeddings": rope.original_max_positions}
    # What it reads of a configuration: parameters in their newest form, and the size of a head.
    config: Any = SimpleNamespace(
        rope_parameters=parameters,
        standardize_rope_params=lambda: None,
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
    )
    return ROPE_INIT_FUNCTIONS[rope.type](config)


def rotary_table(positions: Tensor, inv_freq: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Make cos and sin of positions [T] as [T, 1, head_dim] in the dtype of the activations."""
    angles = positions[:, None].float() * moved(inv_freq, positions.device)  # in bf16 position 257 would be 256
    return tables_of(angles, factor, dtype)


def tables_of(angles: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Make cos and sin of angles [T, head_dim / 2] as `rotary_table` does."""
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]  # both halves of a head turn by the same angles
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def query_scale(positions: Tensor, rope: Rope, dtype: torch.dtype) -> Tensor:
    """[T, 1, 1] factor 1 + beta * log(1 + floor(position / original length)) on rotated queries (ministral3, from Llama 4)."""
    assert rope.llama4_beta is not None and rope.original_max_positions is not None
    scale = 1 + rope.llama4_beta * torch.log(1 + torch.floor(positions / rope.original_max_positions))
    return scale[:, None, None].to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, head_dim]; the two halves of a head are the real and imaginary parts. A table of fewer channels than a
    head has rotates its first ones."""
    if (channels := cos.size(-1)) < x.size(-1):
        return torch.cat((rotate(x[..., :channels], cos, sin), x[..., channels:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def deinterleaved(x: Tensor) -> Tensor:
    """Bring real and imaginary parts from DeepSeek's order, in which each pair stands together, to that of `rotate`."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
