"""Frozen linear layers whose weights are kept in 8 bits: rounding, the weights again, and the layer that computes with them.

A block of a row shares a scale, its largest number over 127 (absmax in blocks, arXiv:2110.02861); a weight is code x scale. The
layer makes its weight for each product and keeps none from forward to backward. Blocks count from the beginning of the whole row,
so a weight is the same number however it is cut; a rank has the scales of all blocks that its columns touch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional

BLOCK = 64
"""Numbers of a row that share a scale."""
SCALE = ".weight_scale"
"""Ending of the name of a weight's scales, behind the name of its module."""
SCALE_BYTES = 2
_LARGEST = 127


def num_blocks(columns: int, first: int = 0) -> int:
    """Scales of a row's part. first: its first column, counted from the beginning of a block."""
    return -(-(first + columns) // BLOCK)


def most_blocks(columns: int, ranks: int) -> int:
    """Scales on the rank that has most of them, of a row cut into `ranks` equal parts."""
    each = columns // ranks
    return max(num_blocks(each, rank * each % BLOCK) for rank in range(ranks))


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight [rows, columns] to (codes int8 [rows, columns], scales bf16 [rows, blocks]), at most half a scale away."""
    blocks = functional.pad(weight.float(), (0, -weight.size(1) % BLOCK)).view(len(weight), -1, BLOCK)
    # bf16: FSDP2 gathers scales in the type of computation, which must not change their values.
    scales = (blocks.abs().amax(-1) / _LARGEST).bfloat16()
    steps = scales.float().unsqueeze(-1)
    # A block of zeros has the scale 0.
    codes = torch.where(steps > 0, blocks / steps, 0.0).round().clamp(-_LARGEST, _LARGEST)
    return codes.flatten(1)[:, : weight.size(1)].to(torch.int8), scales


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype, first: int = 0) -> Tensor:
    """Weight [rows, columns] in `dtype`: codes x scales, rounded once. first: as in `num_blocks`."""
    end = first + codes.size(1)
    padded = functional.pad(codes.to(dtype), (first, -end % BLOCK)).view(len(codes), -1, BLOCK)
    return (padded * scales.to(dtype).unsqueeze(-1)).flatten(1)[:, first:end]


@torch.no_grad()
def fill_randomly(codes: Tensor, scales: Tensor, generator: torch.Generator | None = None) -> None:
    """Fill with a random weight of usual size, for timing."""
    codes.random_(-64, 65, generator=generator)
    scales.fill_(0.0005)


@dataclass(frozen=True)
class Quantised:
    """Rows of a weight in 8 bits, for code that copies parts of weights."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype  # of computation
    first: int = 0  # as in `num_blocks`

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def rectangle(self, row: int, col: int, rows: int, cols: int) -> Tensor:
        """Part [rows, cols] fp32 of the weight that the layer computes with."""
        of_rows = slice(row, row + rows)
        part = dequantise(self.codes.detach()[of_rows], self.scales.detach()[of_rows], self.dtype, self.first)
        return part[:, col : col + cols].float()


class Int8Linear(torch.nn.Linear):
    """Linear layer with a frozen weight in 8 bits: `weight` has the codes, `weight_scale` their scales."""

    weight_scale: torch.nn.Parameter
    _first: int

    def become(self, first: int = 0) -> None:
        """Turn a linear layer on the meta device, whose class was changed to this one, into one in 8 bits.
        If its weight is cut over tp the codes are a DTensor as it was, the scales this rank's. first: as in `num_blocks`."""
        codes = torch.empty_like(self.weight, dtype=torch.int8)
        rows, columns = (codes.to_local() if isinstance(codes, DTensor) else codes).shape
        scales = torch.empty(rows, num_blocks(columns, first), dtype=torch.bfloat16, device="meta")
        self.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
        self._first = first

    def forward(self, input: Tensor) -> Tensor:
        """Under tensor parallel input and output are DTensors, as for a linear layer whose weight is one."""
        if not isinstance(self.weight, DTensor):
            product = int8_product(input, self.weight, self.weight_scale, self._first)
            return product if self.bias is None else product + self.bias
        assert isinstance(input, DTensor), "the input of a layer that is cut over tp is laid out in front of it"
        (cut,) = self.weight.placements
        by_rows = cut == Shard(0)
        assert by_rows or self.bias is None, "a bias would be added on every rank"
        mine = input.to_local(grad_placements=[Partial()] if by_rows else input.placements)  # each rank's rows give a part
        product = int8_product(mine, self.weight.to_local(), self.weight_scale, self._first)
        product = product if self.bias is None else product + cast(DTensor, self.bias).to_local()
        return DTensor.from_local(product, input.device_mesh, [Shard(product.dim() - 1) if by_rows else Partial()], run_check=False)


def int8_product(x: Tensor, codes: Tensor, scales: Tensor, first: int = 0) -> Tensor:
    """Compute x W^T in the type of x: [..., columns] -> [..., rows], W in 8 bits. first: as in `num_blocks`."""
    return _Product.apply(x, codes, scales, first)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, first: int) -> Tensor:
        ctx.save_for_backward(codes, scales)  # the backward makes W again: autograd would keep the weights of all layers
        ctx.first = first
        return functional.linear(x, dequantise(codes, scales, x.dtype, first))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (gradient,) = gradients
        codes, scales = ctx.saved_tensors
        return gradient @ dequantise(codes, scales, gradient.dtype, ctx.first), None, None, None
