"""The checksum: additive over any cut, and blind to neither a changed byte nor a misplaced rectangle."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.bridge.checksum import block_bytes, rectangle_sum

MASK = (1 << 64) - 1


def hashed(index: int, seed: int) -> int:
    mixed = (index + 1 + (seed << 40)) * 0x9E3779B97F4A7C15 & MASK
    signed = mixed - (1 << 64) if mixed >> 63 else mixed
    return (mixed ^ (signed >> 31) & MASK) * 0xBF58476D1CE4E5B9 & MASK | 1


def definition(values: torch.Tensor, block: int, row: int, col: int) -> int:
    """The sum in Python integers: words added up in blocks, weighted by odd hashes of row and block column, as a signed number."""
    size, word, total = values.element_size(), min(block, 8), 0
    for r, line in enumerate(values.tolist()):
        raw = b"".join(struct.pack("<f", value)[4 - size :] for value in line)  # a bf16 is the upper half of a float32
        for start in range(0, len(raw), block):
            words = [raw[at : at + word] for at in range(start, start + block, word)]
            plain = sum(int.from_bytes(one, "little", signed=True) for one in words)
            total += plain * hashed(row + r, 0) * hashed((col * size + start) // block, 1)
    total &= MASK
    return total - (1 << 64) if total >> 63 else total


def random_values(rows: int, cols: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cols, row, col", [(7, 0, 0), (8, 5, 16), (12, 1_000_003, 4), (512, 2, 0)])
def test_checksum_follows_its_definition(dtype, cols, row, col):
    values = random_values(5, cols, 1, dtype)
    block = block_bytes(values.element_size(), [col, col + cols])
    assert int(rectangle_sum(values, block, row, col)) == definition(values, block, row, col)


def test_a_block_divides_every_cut():
    assert block_bytes(2, [0, 4096]) == 512, "no larger than half a kilobyte"
    assert block_bytes(2, [0, 48, 96]) == 32 and block_bytes(4, [0, 6, 12]) == 8 and block_bytes(2, [1]) == 2


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 8), st.integers(0, 24), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(), st.integers(0, 1 << 20)
)
def test_any_cut_of_a_parameter_adds_up(row, col, dtype, strided, seed):
    """The parts are views of a larger tensor, of a converted one, or of one that begins between two words."""
    wide = random_values(8, 27, seed)
    values = wide.to(dtype)[:, 3:] if strided else wide[:, 3:].to(dtype)
    block = block_bytes(values.element_size(), [0, col, 24])
    parts = [
        rectangle_sum(wide[r0:r1, 3 + c0 : 3 + c1], block, r0, c0, dtype)
        for r0, r1 in ((0, row), (row, 8))
        for c0, c1 in ((0, col), (col, 24))
    ]
    assert int(sum(parts)) == int(rectangle_sum(values, block))


def test_large_tensors_are_summed_in_chunks_like_small_ones():
    values = random_values(70_000, 128, 2)
    parts = [rectangle_sum(values[r : r + 999], 512, r) for r in range(0, 70_000, 999)]
    assert int(sum(parts)) == int(rectangle_sum(values, 512))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 8 * 64 * 4 - 1), st.integers(1, 255), st.sampled_from([4, 8, 64, 256]), st.integers(0, 1 << 20))
def test_one_changed_byte_changes_the_sum(at, change, block, seed):
    values = random_values(8, 64, seed)
    before = int(rectangle_sum(values, block))
    values.view(torch.uint8).view(-1)[at] ^= change
    assert int(rectangle_sum(values, block)) != before


@pytest.mark.parametrize("moved", ["rows swapped", "shifted by one", "halves swapped", "shards of columns swapped", "transposed"])
def test_the_same_values_elsewhere_change_the_sum(moved):
    values = random_values(16, 16, 3)
    block = block_bytes(4, [0, 8, 16])  # cut in two shards
    other = {
        "rows swapped": values[[1, 0, *range(2, 16)]],
        "shifted by one": values.view(-1).roll(1).view(16, 16),
        "halves swapped": values.roll(8, 0),
        "shards of columns swapped": values.roll(8, 1),
        "transposed": values.t(),
    }[moved]
    assert math.isclose(float(other.sum()), float(values.sum()), abs_tol=1e-4)
    assert int(rectangle_sum(other, block)) != int(rectangle_sum(values, block))
