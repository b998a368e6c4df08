"""Weights in 8 bits: rounding against numbers written out, and the layer against a dense one of the rounded weights."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from megappo.models.hf_import import read_int8
from megappo.models.int8_linear import BLOCK, Int8Linear, Quantised, dequantise, int8_product, most_blocks, num_blocks, quantise
from megappo.models.lora import Adapted
from megappo.models.pieces import Box
from tests.models.int8_oracle import rounded

SHAPES = [(5, 64), (3, 200), (1, 7), (4, 128)]


def weight_of(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    weight[0, :BLOCK] = 0.0  # a block without a scale
    weight[-1, -1] = 3.0  # an outlier costs its own block alone
    return weight


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_those_of_the_formula_at_most_half_a_scale_away(shape: tuple[int, int]) -> None:
    weight = weight_of(*shape)
    codes, scales = quantise(weight)
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.bfloat16)
    assert codes.shape == weight.shape and scales.shape == (shape[0], num_blocks(shape[1]))
    found = dequantise(codes, scales, torch.float32)
    assert torch.equal(found.double(), torch.from_numpy(rounded(weight.double().numpy())))
    half = scales.double().repeat_interleave(BLOCK, 1)[:, : shape[1]] / 2
    assert bool(((weight.double() - found.double()).abs() <= half * (1 + 1e-6)).all())
    assert torch.equal(dequantise(codes, scales, torch.bfloat16), found.bfloat16()), "rounded once"


def test_the_error_of_a_normal_weight() -> None:
    """Stated in docs/engines.md."""
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    error = dequantise(*quantise(weight), torch.float32) - weight
    assert 0.004 < float(error.norm() / weight.norm()) < 0.007


@pytest.mark.parametrize("bias", [False, True])
def test_the_layer_is_a_dense_one_of_the_rounded_weights(bias: bool) -> None:
    weight, x = weight_of(24, 100), torch.randn(6, 100, generator=torch.Generator().manual_seed(1))
    with torch.device("meta"):
        layer = torch.nn.Linear(100, 24, bias=bias)
    layer.__class__ = Int8Linear
    ours = cast(Int8Linear, layer)
    ours.become()
    ours.to_empty(device="cpu")
    codes, scales = quantise(weight)
    with torch.no_grad():
        ours.weight.copy_(codes)
        ours.weight_scale.copy_(scales)
        if bias:
            ours.bias.copy_(torch.arange(24.0))
    dense = torch.from_numpy(rounded(weight.double().numpy())).float()
    first, second = (x.clone().requires_grad_() for _ in range(2))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one), one)[1], lambda one: one):
        output = ours(first)
    wanted = torch.nn.functional.linear(second, dense, ours.bias)
    assert torch.equal(output, wanted)
    assert not any(one.is_floating_point() and one.numel() >= dense.numel() for one in kept), "no weight waits for the backward"
    for one in (output, wanted):
        one.square().sum().backward()
    assert torch.allclose(first.grad, second.grad, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(output, torch.nn.functional.linear(x, weight, ours.bias)), "negative control: the rounding is seen"


@pytest.mark.parametrize("first, columns", [(0, 64), (48, 48), (96, 33), (130, 1)])
def test_columns_of_a_weight_are_the_same_numbers_wherever_it_is_cut(first: int, columns: int) -> None:
    """As a tp rank reads a row-parallel weight: scales are of whole blocks, which other ranks have columns of."""
    weight = weight_of(5, 131)
    codes, scales = read_int8(cast(Any, _Slice(weight)), Box(1, 5, first, first + columns))
    assert scales.shape == (4, num_blocks(columns, first % BLOCK))
    wanted = dequantise(*quantise(weight), torch.float32)[1:, first : first + columns]
    assert torch.equal(dequantise(codes, scales, torch.float32, first % BLOCK), wanted)
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1), requires_grad=True)
    product = int8_product(x, codes, scales, first % BLOCK)
    product.sum().backward()
    assert torch.equal(product, x @ wanted.t()) and torch.allclose(x.grad, wanted.sum(0).expand(3, -1), atol=1e-6)
    base = Quantised(codes, scales, torch.float32, first % BLOCK)
    assert torch.equal(base.rectangle(1, columns // 2, 2, columns - columns // 2), wanted[1:3, columns // 2 :])
    own = quantise(weight[1:, first : first + columns])
    assert first == 0 or not torch.equal(dequantise(*own, torch.float32), wanted), "negative control: blocks of the part alone"


def test_the_rank_with_most_scales_is_counted() -> None:
    """96 columns over two ranks: 48 in one block, and 48 in two."""
    assert (num_blocks(48), num_blocks(48, 48), most_blocks(96, 2), most_blocks(256, 2)) == (1, 2, 2, 2)


class _Slice:
    """A tensor as safetensors hands out one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


def test_parts_of_a_weight_with_its_adapter_are_read_in_fp32() -> None:
    weight = weight_of(6, 130)
    codes, scales = quantise(weight)
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(3, 130, generator=generator), torch.randn(6, 3, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        base = Quantised(codes, scales, dtype)
        whole = dequantise(codes, scales, dtype).float()
        assert base.shape == weight.shape and torch.equal(base.rectangle(1, 3, 4, 100), whole[1:5, 3:103])
        merged = Adapted(base, a, b, 0.5).rectangle(1, 3, 4, 100)
        assert torch.allclose(merged.double(), (whole.double() + 0.5 * (b.double() @ a.double()))[1:5, 3:103], atol=1e-5)
