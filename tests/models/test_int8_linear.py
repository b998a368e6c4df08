"""Weights in 8 bits: rounding against numbers written out, and the layer against a dense one of the rounded weights."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from megappo.models.int8_linear import BLOCK, Int8Linear, Quantised, dequantise, num_blocks, quantise
from megappo.models.lora import Adapted
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
    """Stated in docs/lora.md."""
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
