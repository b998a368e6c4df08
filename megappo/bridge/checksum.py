"""Checksum of a parameter that is additive over rectangles and runs at the speed of memory.

A parameter's bytes are cut into blocks along its rows; the checksum is  sum_rb a(r) * b(c) * s(r, c)  mod 2^64, with s the sum of
the machine words of the block in row r and block column c, and a, b odd hashes. Odd weights are invertible, so a change within one
word always shows; misplaced rows and blocks show but for one chance in about 2^60. Words exchanged within a block do not show.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LARGEST_BLOCK = 512
_CHUNK = 1 << 24  # bytes at once: the sums of the blocks stay below 64 MiB, for blocks of two bytes


def block_bytes(itemsize: int, columns: Iterable[int]) -> int:
    """Return the largest power of two, at most 512 bytes, that divides rows cut at these columns."""
    width = gcd(*columns) * itemsize
    return min(width & -width, _LARGEST_BLOCK)


def rectangle_sum(values: Tensor, block: int, row: int = 0, col: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """Return the contribution of [rows, cols] `values` at (row, col) of a parameter: int64 scalar on their device, modulo 2^64.
    block: bytes; divides the rows of `values` and their first column. row: counted over all slots of the parameter. dtype: of the
    parameter, to which the values are rounded; None: theirs."""
    rows, cols = values.shape
    size = (dtype or values.dtype).itemsize
    width = block // size
    last = (col + cols) // width
    by_col = _weights(1, last, values.device)[col // width : last]
    by_row = _weights(0, row + rows, values.device)[row : row + rows]
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    step = max(1, _CHUNK // max(1, cols * size))
    for r0 in range(0, rows if cols else 0, step):
        words = _words(values[r0 : r0 + step].to(dtype or values.dtype), min(block, 8)).unflatten(1, (last - col // width, -1))
        blocks = words.sum(2, dtype=torch.int64) if words.shape[2] > 1 else words[..., 0].long()
        total += ((blocks * by_col).sum(1) * by_row[r0 : r0 + len(blocks)]).sum()
    return total


def _words(values: Tensor, size: int) -> Tensor:
    """View a matrix as [rows, words] integers of `size` bytes; a copy if its rows do not begin at a whole word."""
    item = values.element_size()
    starts = values.storage_offset() * item, values.stride(0) * item
    if values.stride(1) != 1 or any(start % size for start in starts):
        values = values.clone(memory_format=torch.contiguous_format)
    return values.view(_WORDS[size])


def _weights(kind: int, count: int, device: torch.device) -> Tensor:
    """Return at least `count` weights of rows (kind 0) or block columns (1)."""
    # Rounded up: few different lengths, so the cache hits
    return _odd_hashes(kind, 1 << max(10, (count - 1).bit_length()), device)


@lru_cache(maxsize=64)
def _odd_hashes(seed: int, count: int, device: torch.device) -> Tensor:
    """Return odd 64-bit hashes of 0 .. count - 1 (multiply, xor-shift, multiply); int64 products wrap modulo 2^64."""
    # The multipliers of splitmix64 (2^64 / golden ratio, and of its mixer) as signed integers.
    mixed = (torch.arange(1, count + 1, device=device) + (seed << 40)) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 31)) * -4658895280553007687
    return mixed | 1
