"""Frozen linear layers whose weights are kept in 8 bits: rounding, the weights again, and the layer that computes with them.

A block of a row shares a scale, the largest number of the block over 127 (absmax in blocks, arXiv:2110.02861); a weight is code x
scale. The layer makes its weight in the type of computation for each of its products, and keeps none from forward to backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 64
"""Numbers of a row that share a scale."""
SCALE = ".weight_scale"
"""Ending of the name of a weight's scales, behind the name of its module."""
_LARGEST = 127


def num_blocks(columns: int) -> int:
    """Scales of a row."""
    return -(-columns // BLOCK)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes int8 [rows, columns], scales bf16 [rows, blocks]) of a weight [rows, columns], each at most half a scale away."""
    blocks = functional.pad(weight.float(), (0, -weight.size(1) % BLOCK)).view(len(weight), -1, BLOCK)
    # bf16: FSDP2 gathers them in the type of computation, in which they have to be the same numbers.
    scales = (blocks.abs().amax(-1) / _LARGEST).bfloat16()
    steps = scales.float().unsqueeze(-1)
    codes = torch.where(steps > 0, blocks / steps, 0.0).round().clamp(-_LARGEST, _LARGEST)
    return codes.flatten(1)[:, : weight.size(1)].to(torch.int8), scales


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Weight [rows, columns] in `dtype`: codes x scales, rounded once."""
    padded = functional.pad(codes.to(dtype), (0, -codes.size(1) % BLOCK)).view(len(codes), -1, BLOCK)
    return (padded * scales.to(dtype).unsqueeze(-1)).flatten(1)[:, : codes.size(1)]


@dataclass(frozen=True)
class Quantised:
    """A weight in 8 bits, as those read it that copy parts of weights: codes and scales of its rows, dtype: of computation."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def rectangle(self, row: int, col: int, rows: int, cols: int) -> Tensor:
        """[rows, cols] fp32 of the weight that the layer computes with."""
        part = dequantise(self.codes.detach()[row : row + rows], self.scales.detach()[row : row + rows], self.dtype)
        return part[:, col : col + cols].float()


class Int8Linear(torch.nn.Linear):
    """Linear layer with a frozen weight in 8 bits: `weight` has the codes, `weight_scale` their scales."""

    weight_scale: torch.nn.Parameter

    def become(self) -> None:
        """Take the place of a linear layer on the meta device, whose class was changed to this one."""
        codes = torch.empty_like(self.weight, dtype=torch.int8)
        scales = torch.empty(self.out_features, num_blocks(self.in_features), dtype=torch.bfloat16, device=codes.device)
        self.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.weight_scale = torch.nn.Parameter(scales, requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = _Product.apply(input, self.weight, self.weight_scale)
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """x W^T. Its backward makes W again: autograd would keep the weights of all layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return functional.linear(x, dequantise(codes, scales, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        (gradient,) = gradients
        codes, scales = ctx.saved_tensors
        return gradient @ dequantise(codes, scales, gradient.dtype), None, None
