"""Rotary position embedding of packed sequences: frequencies, the table of one micro-batch, and the rotation.

Frequencies follow transformers' modeling_rope_utils operation by operation in fp32, so the two agree bit for bit. Megatron's rotary
modules recompute cos and sin in every layer and cannot express all of these types.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megappo.data.packing import moved
from megappo.models.arch import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Return ([head_dim / 2] fp32 inverse frequencies, factor on cos and sin)."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.type == "default":
        return 1.0 / powers, 1.0
    assert rope.factor is not None
    if rope.type == "linear":
        return 1.0 / powers / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(rope, 1.0 / powers), 1.0
    assert rope.type == "yarn", rope.type
    return _yarn(rope, powers, head_dim), _yarn_attention_factor(rope)


def _llama3(rope: Rope, inv_freq: Tensor) -> Tensor:
    """Stretch long waves by `factor`, keep short ones, with a ramp between (Llama 3.1)."""
    assert rope.factor and rope.low_freq_factor and rope.high_freq_factor and rope.original_max_positions
    wavelength = 2 * math.pi / inv_freq
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    stretched = torch.where(wavelength > longest, inv_freq / rope.factor, inv_freq)
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ramp = (1 - smooth) * stretched / rope.factor + smooth * stretched
    return torch.where((wavelength >= shortest) & (wavelength <= longest), ramp, stretched)


def _yarn(rope: Rope, powers: Tensor, dim: int) -> Tensor:
    """NTK by parts: Peng et al. 2023, "YaRN", section 3.2."""
    original = rope.original_max_positions
    assert rope.factor and original

    def dim_with_rotations(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_with_rotations(rope.beta_fast), dim_with_rotations(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as transformers: no division by 0
    keep = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_attention_factor(rope: Rope) -> float:
    factor = rope.factor
    assert factor
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


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
