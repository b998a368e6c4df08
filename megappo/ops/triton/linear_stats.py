"""Fused `linear_stats`: the logits of a tile live in registers between the product and the running statistic, never in memory.
A program takes a block of tokens and a split of the vocabulary, tile by tile; the splits' statistics [splits, T, 4] are merged
like blocks of columns. Programs of the same split are neighbours, so that a tile of weights comes from the L2. Calls that keep,
restrict or round the logits, or need bits independent of the batch, run in blocks of `linear_stats.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megappo.ops.implementations import interpreted
from megappo.ops.linear_blocks import LinearLogits, merge_blocks
from megappo.ops.linear_stats import stats_in_blocks

# Half types from Hopper on: 128 accumulators for each of 256 threads, and four stages of 48 KB. Before it mma.sync needs
# registers for its operands too: half as many accumulators, and four stages of 32 KB. Compiled for sm_80 and sm_90a, none
# spills inside its loop over the hidden size, and at most ten registers around it.
HOPPER_TILE = {"BLOCK_T": 128, "BLOCK_V": 256, "BLOCK_H": 64, "num_warps": 8, "num_stages": 4}
AMPERE_TILE = {"BLOCK_T": 128, "BLOCK_V": 128, "BLOCK_H": 64, "num_warps": 8, "num_stages": 4}
# At full precision fp32 has no tensor cores.
FP32_TILE = {"BLOCK_T": 64, "BLOCK_V": 64, "BLOCK_H": 32, "num_warps": 4, "num_stages": 2}
ROUNDS = 16  # programs per multiprocessor: a last round that is half empty costs 3 %
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _linear_stats(
    hidden,
    weight,
    target,
    row_inv_temp,
    inv_temp,
    partial,
    num_tokens,
    hidden_size,
    num_valid,
    tiles_per_split,
    vocab_start,
    ignore_index,
    hidden_stride,
    weight_stride,
    PER_ROW: tl.constexpr,
    ENTROPY: tl.constexpr,
    EVEN_H: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    split = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_rows = row < num_tokens
    k = tl.arange(0, BLOCK_H)
    h_at = hidden + row[:, None] * hidden_stride + k[None, :]
    label = tl.load(target + row, mask=in_rows, other=ignore_index)
    # In 32 bits: 64-bit ids would cost registers that the accumulators need.
    owned = (label >= vocab_start) & (label < vocab_start + num_valid)
    own_label = tl.where(owned, label - vocab_start, -1).to(tl.int32)
    scale = tl.load(row_inv_temp + row, mask=in_rows, other=1.0) if PER_ROW else tl.full((BLOCK_T,), inv_temp, tl.float32)

    m = tl.full((BLOCK_T,), NOTHING, tl.float32)
    s = tl.zeros((BLOCK_T,), tl.float32)
    t = tl.zeros((BLOCK_T,), tl.float32)
    z = tl.full((BLOCK_T,), NOTHING, tl.float32)
    for tile in range(split * tiles_per_split, (split + 1) * tiles_per_split):
        column = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        in_columns = column < num_valid
        w_at = weight + column[None, :].to(tl.int64) * weight_stride + k[:, None]
        x = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        for first in range(0, hidden_size, BLOCK_H):
            if EVEN_H:
                h = tl.load(h_at + first, mask=in_rows[:, None], other=0.0)
                w = tl.load(w_at + first, mask=in_columns[None, :], other=0.0)
            else:
                in_hidden = first + k < hidden_size
                h = tl.load(h_at + first, mask=in_rows[:, None] & in_hidden[None, :], other=0.0)
                w = tl.load(w_at + first, mask=in_columns[None, :] & in_hidden[:, None], other=0.0)
            if WIDEN:
                h, w = h.to(tl.float32), w.to(tl.float32)
            x = tl.dot(h, w, x, input_precision="ieee")
        x = tl.where(in_columns[None, :], x * scale[:, None], NOTHING)

        here = column[None, :] == own_label[:, None]
        z = tl.maximum(z, tl.max(tl.where(here, x, NOTHING), 1))
        top = tl.maximum(m, tl.max(x, 1))
        base = tl.where(top == NOTHING, 0.0, top)
        d = m - base
        fade = tl.exp(d)
        # An empty sum has d = -inf, and its t must be 0 and not 0 * -inf = NaN.
        t = tl.where(s == 0.0, 0.0, fade * (t + d * s))
        d_x = x - base[:, None]
        e = tl.exp(d_x)
        s = fade * s + tl.sum(e, 1)
        if ENTROPY:
            t += tl.sum(tl.where(e == 0.0, 0.0, e * d_x), 1)
        m = top

    counts = label != ignore_index
    at = partial + (split.to(tl.int64) * num_tokens + row) * 4
    tl.store(at, tl.where(counts, m, NOTHING), mask=in_rows)
    tl.store(at + 1, tl.where(counts, s, 0.0), mask=in_rows)
    tl.store(at + 2, tl.where(counts, t, 0.0), mask=in_rows)
    tl.store(at + 3, tl.where(counts, z, NOTHING), mask=in_rows)


def linear_stats(problem: LinearLogits, want_entropy: bool, keep_logits: bool, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """See `megappo.ops.linear_stats.linear_stats`. Beside its result the kernel holds 16 bytes for each token and split."""
    hidden, weight, target, vocab_start, num_valid, inv_temp, row_inv_temp, ignore_index, *modes = problem
    num_tokens, hidden_size = hidden.shape
    if modes != [None, False, False] or keep_logits or num_tokens == 0 or num_valid == 0:
        return stats_in_blocks(problem, want_entropy, keep_logits, chunk_tokens)
    tile = _tile(hidden)
    hidden, weight = (x if x.stride(1) == 1 else x.contiguous() for x in (hidden, weight))
    blocks_of_tokens, tiles = triton.cdiv(num_tokens, tile["BLOCK_T"]), triton.cdiv(num_valid, tile["BLOCK_V"])
    tiles_per_split = triton.cdiv(tiles, _splits(hidden.device, blocks_of_tokens, tiles))
    splits = triton.cdiv(tiles, tiles_per_split)
    partial = torch.empty(splits, num_tokens, 4, dtype=torch.float32, device=hidden.device)
    _linear_stats[(blocks_of_tokens, splits)](
        hidden,
        weight,
        target.contiguous(),
        None if row_inv_temp is None else row_inv_temp.contiguous(),
        inv_temp,
        partial,
        num_tokens,
        hidden_size,
        num_valid,
        tiles_per_split,
        vocab_start,
        ignore_index,
        hidden.stride(0),
        weight.stride(0),
        PER_ROW=row_inv_temp is not None,
        ENTROPY=want_entropy,
        EVEN_H=hidden_size % tile["BLOCK_H"] == 0,
        WIDEN=interpreted(),  # the interpreter multiplies the bits of bf16 as integers
        **tile,
    )
    return merge_blocks(partial), hidden.new_empty((0, 0), dtype=problem.dtype)


def _tile(hidden: Tensor) -> dict[str, int]:
    if hidden.dtype == torch.float32:
        return FP32_TILE
    hopper = hidden.device.type == "cpu" or torch.cuda.get_device_capability(hidden.device) >= (9, 0)
    return HOPPER_TILE if hopper else AMPERE_TILE


def _splits(device: torch.device, blocks_of_tokens: int, tiles: int) -> int:
    """Splits of the vocabulary that give each multiprocessor ROUNDS programs."""
    if device.type == "cpu":  # the interpreter, in tests: two splits have a border
        return min(2, tiles)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(max(triton.cdiv(ROUNDS * processors, blocks_of_tokens), 1), tiles)
