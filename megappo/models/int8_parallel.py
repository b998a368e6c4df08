"""Megatron-core's parallel linears with frozen weights in 8 bits: `weight` has this rank's codes, `weight_scale` their scales.

`int8_linear.py` has the rounding, the blocks and the product.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megappo.models.int8_linear import BLOCK, Quantised, int8_product, num_blocks


class Int8ColumnParallelLinear(ColumnParallelLinear):
    """This rank's rows of a weight in 8 bits, in whole blocks."""

    weight_scale: torch.nn.Parameter
    first: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _keep_in_8_bits(self, 0)

    # Megatron's own product for a frozen weight would keep the weight until the backward.
    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **how: Any) -> Tensor:
        if how["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=how["tp_group"])
        elif how["allreduce_dgrad"]:
            input = copy_to_tensor_model_parallel_region(input, group=how["tp_group"])
        product = int8_product(input, weight, self.weight_scale)
        return product if bias is None else product + bias


class Int8RowParallelLinear(RowParallelLinear):
    """This rank's columns of a weight in 8 bits, which may begin inside a block."""

    weight_scale: torch.nn.Parameter
    first: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tp_rank = cast(dist.ProcessGroup, self.tp_group).rank()
        _keep_in_8_bits(self, tp_rank * self.input_size_per_partition % BLOCK)

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> Tensor:
        assert bias is None, "Megatron adds the bias to the sum over tp"
        return int8_product(input, weight, self.weight_scale, self.first)


def _keep_in_8_bits(linear: Any, first: int) -> None:
    # Called as each linear is made, so that only one weight at a time exists in its own type. first: as in `num_blocks`.
    rows, columns = linear.weight.shape
    made = {"device": linear.weight.device}
    scales = torch.empty(rows, num_blocks(columns, first), dtype=torch.bfloat16, **made)
    linear.weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=torch.int8, **made), requires_grad=False)
    linear.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
    linear.first = first


def quantised(linear: torch.nn.Module, dtype: torch.dtype) -> Quantised | None:
    """Return the weight of a linear in 8 bits, None for any other module. dtype: of computation."""
    if not isinstance(linear, Int8ColumnParallelLinear | Int8RowParallelLinear):
        return None
    return Quantised(cast(Tensor, linear.weight), linear.weight_scale, dtype, linear.first)
