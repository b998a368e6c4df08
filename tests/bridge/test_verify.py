"""The checksum: additive over any cut, and blind to neither a changed element nor a misplaced one."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.bridge.verify import rectangle_sum

MASK = (1 << 64) - 1


def definition(values: torch.Tensor, base: int, stride: int) -> int:
    """The sum in Python integers: sum of bits * (odd hash of the flat index), modulo 2^64, as a signed number."""
    total = 0
    for r, row in enumerate(values.tolist()):
        for c, value in enumerate(row):
            packed = struct.pack("<f", value)
            bits = (
                int.from_bytes(packed, "little", signed=True)
                if values.dtype == torch.float32
                else (
                    int.from_bytes(packed[2:], "little", signed=True)  # a bf16 is the upper half of a float32
                )
            )
            index = base + r * stride + c
            mixed = index * 0x9E3779B97F4A7C15 & MASK
            signed = mixed - (1 << 64) if mixed >> 63 else mixed
            weight = ((mixed ^ (signed >> 31) & MASK) * 0xBF58476D1CE4E5B9 & MASK) | 1
            total += bits * weight
    total &= MASK
    return total - (1 << 64) if total >> 63 else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base, stride", [(0, 7), (1_000_000_007, 4096)])
def test_checksum_follows_its_definition(dtype, base, stride):
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert rectangle_sum(values, base, stride) == definition(values, base, stride)


def test_large_tensors_are_summed_in_chunks_like_small_ones():
    values = torch.randn(70_000, 64, generator=torch.Generator().manual_seed(2))
    parts = sum(rectangle_sum(values[r : r + 999], r * 64, 64) for r in range(0, 70_000, 999))
    assert (rectangle_sum(values, 0, 64) - parts) % (1 << 64) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 8), st.integers(0, 6), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 1 << 20))
def test_any_cut_of_a_parameter_adds_up(row, col, dtype, seed):
    values = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)
    parts = [
        rectangle_sum(values[r0:r1, c0:c1], r0 * 6 + c0, 6) for r0, r1 in ((0, row), (row, 8)) for c0, c1 in ((0, col), (col, 6))
    ]
    assert (sum(parts) - rectangle_sum(values, 0, 6)) % (1 << 64) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 47), st.integers(0, 31), st.integers(0, 1 << 20))
def test_one_flipped_bit_changes_the_sum(element, bit, seed):
    values = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    before = rectangle_sum(values, 0, 6)
    flipped = values.clone()
    flipped.view(torch.int32).view(-1)[element] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert rectangle_sum(flipped, 0, 6) != before


@pytest.mark.parametrize("moved", ["rows swapped", "shifted by one", "halves swapped"])
def test_the_same_values_elsewhere_change_the_sum(moved):
    values = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    order = {
        "rows swapped": [1, 0, *range(2, 8)],
        "shifted by one": [*range(1, 8), 0],
        "halves swapped": [*range(4, 8), *range(4)],
    }[moved]
    assert rectangle_sum(values[order], 0, 6) != rectangle_sum(values, 0, 6)
