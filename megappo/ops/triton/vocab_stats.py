"""Triton twins of `ops/vocab_stats.py`, with the plan of csrc/vocab_stats/: segments of a row, folded from left to right.
Each lane of a program keeps a running (m, s, t) in registers; the lanes are reduced once, at the end of the segment. Segment and
tile sizes depend on the width of the vocabulary only, so the bits of a row do not depend on the batch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megappo.ops.vocab_stats import (
    EXPONENT_FLOOR,
    Softmax,
    Upstream,
    check_arguments,
    check_gathered,
    check_out,
    check_overwritable,
)

SEGMENT = 32768  # columns
LANES, ROWS = 1024, 4  # tile of a program
BACKWARD_BLOCK = 2048  # 16 columns for each of 128 threads: with twice as many the registers would halve the bytes in flight
ROWS_PER_PROGRAM = 128  # of the fold and the merge
FLOOR = tl.constexpr(EXPONENT_FLOOR)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _segments(
    logits,
    row_stride,
    target,
    row_inv_temp,
    inv_temp,
    out,
    num_segments,
    segment_columns,
    vocab_start,
    num_valid,
    ignore_index,
    PER_ROW: tl.constexpr,
    ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    unit = tl.program_id(0)
    row = (unit // num_segments).to(tl.int64)  # T * V exceeds 2^31
    start = unit % num_segments * segment_columns
    label = tl.load(target + row)
    # Rows without a target read nothing.
    end = tl.where(label == ignore_index, start, tl.minimum(start + segment_columns, num_valid))
    scale = tl.load(row_inv_temp + row) if PER_ROW else inv_temp
    x = logits + row * row_stride

    m = tl.full((LANES,), NOTHING, tl.float32)
    s = tl.zeros((LANES,), tl.float32)
    t = tl.zeros((LANES,), tl.float32)
    offset = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    for first in range(start, end, ROWS * LANES):
        column = first + offset
        z = tl.load(x + column, mask=column < end, other=NOTHING).to(tl.float32) * scale
        top = tl.maximum(m, tl.max(z, 0))
        base = tl.where(top == NOTHING, 0.0, top)
        d = m - base
        w = tl.exp(d)
        shift = z - base[None, :]
        e = tl.exp(shift)
        if ENTROPY:
            t = w * (t + tl.maximum(d, FLOOR) * s) + tl.sum(e * tl.maximum(shift, FLOOR), 0)
        s = w * s + tl.sum(e, 0)
        m = top

    top = tl.max(m, 0)
    d = m - tl.where(top == NOTHING, 0.0, top)
    w = tl.exp(d)
    local = label - vocab_start
    owned = (local >= start) & (local < end)
    at = out + unit.to(tl.int64) * 4
    tl.store(at, top)
    tl.store(at + 1, tl.sum(w * s, 0))
    tl.store(at + 2, tl.sum(w * (t + tl.maximum(d, FLOOR) * s), 0) if ENTROPY else 0.0)
    tl.store(at + 3, tl.load(x + local, mask=owned, other=NOTHING).to(tl.float32) * scale if owned else NOTHING)


@triton.jit
def _folded(m_a, s_a, t_a, m_b, s_b, t_b):
    """Merge the statistics of two neighbours; an empty one (s = 0) is the identity."""
    m = tl.maximum(m_a, m_b)
    base = tl.where(m == NOTHING, 0.0, m)
    d_a, d_b = tl.maximum(m_a - base, FLOOR), tl.maximum(m_b - base, FLOOR)
    w_a, w_b = tl.where(s_a == 0.0, 0.0, tl.exp(d_a)), tl.where(s_b == 0.0, 0.0, tl.exp(d_b))
    return m, w_a * s_a + w_b * s_b, w_a * (t_a + d_a * s_a) + w_b * (t_b + d_b * s_b)


@triton.jit
def _fold_all(stats, row, inside, count, stride):
    """Merge the statistics of `row` over `count` neighbours, `stride` statistics apart."""
    # `where` only to give the constants the shape of the block.
    m = tl.where(inside, NOTHING, NOTHING).to(tl.float32)
    s = tl.where(inside, 0.0, 0.0).to(tl.float32)
    t, z = s, m
    for i in range(count):
        at = stats + (row + i * stride) * 4
        m_b, s_b = tl.load(at, mask=inside, other=NOTHING), tl.load(at + 1, mask=inside, other=0.0)
        t_b, z_b = tl.load(at + 2, mask=inside, other=0.0), tl.load(at + 3, mask=inside, other=NOTHING)
        m, s, t = _folded(m, s, t, m_b, s_b, t_b)
        z = tl.maximum(z, z_b)
    return m, s, t, z


@triton.jit
def _fold(segments, out, num_tokens, num_segments, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_tokens
    m, s, t, z = _fold_all(segments, row * num_segments, inside, num_segments, 1)
    at = out + row * 4
    tl.store(at, m, mask=inside)
    tl.store(at + 1, s, mask=inside)
    tl.store(at + 2, t, mask=inside)
    tl.store(at + 3, z, mask=inside)


@triton.jit
def _merge(gathered, target, logprob, entropy, lse, num_ranks, num_tokens, ignore_index, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_tokens
    m, s, t, z = _fold_all(gathered, row, inside, num_ranks, num_tokens)
    log_s = tl.log(s)
    total = m + log_s
    kept = tl.load(target + row, mask=inside, other=0) != ignore_index
    tl.store(lse + row, total, mask=inside)
    tl.store(logprob + row, tl.where(kept, z - total, 0.0), mask=inside)
    tl.store(entropy + row, tl.where(kept, log_s - t / s, 0.0), mask=inside)


@triton.jit
def _expm1(x):
    # Triton has no expm1: a series near 0, else the difference.
    series = 1.0 + x / 7.0
    series = 1.0 + x / 6.0 * series
    series = 1.0 + x / 5.0 * series
    series = 1.0 + x / 4.0 * series
    series = 1.0 + x / 3.0 * series
    series = 1.0 + x / 2.0 * series
    # At 0.3 the first term left out is 5e-9 of the result, below fp32's rounding; beyond it the difference loses two bits.
    return tl.where(tl.abs(x) < 0.3, x * series, tl.exp(x) - 1.0)


@triton.jit
def _backward(
    logits,
    row_stride,
    target,
    lse,
    entropy,
    g_logprob,
    g_entropy,
    row_inv_temp,
    inv_temp,
    out,
    out_stride,
    num_blocks,
    num_columns,
    vocab_start,
    num_valid,
    ignore_index,
    PER_ROW: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    unit = tl.program_id(0)
    row = (unit // num_blocks).to(tl.int64)
    column = unit % num_blocks * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(target + row)
    scale = tl.load(row_inv_temp + row) if PER_ROW else inv_temp
    g = tl.load(g_logprob + row) * scale
    strength = tl.abs(g)
    if ENTROPY:
        g_h = tl.load(g_entropy + row) * scale
        strength += tl.abs(g_h)
    h = tl.load(entropy + row)

    # A row without target or upstream gradient gets 0, even if its logits are NaN.
    unused = (label == ignore_index) | (strength == 0.0)
    valid = column < tl.where(unused, 0, num_valid)
    z = tl.load(logits + row * row_stride + column, mask=valid, other=0.0).to(tl.float32) * scale
    d = z - tl.load(lse + row)
    p = tl.exp(d)
    grad = -p * g
    if ENTROPY:
        grad -= p * g_h * tl.maximum(d + h, FLOOR)
    mine = column == label - vocab_start
    # The logit comes from the tile and not from memory, which another thread of the program may have overwritten in place.
    d_y = tl.sum(tl.where(mine, d, 0.0), 0)
    at_target = -g * _expm1(d_y)
    if ENTROPY:
        at_target -= g_h * tl.exp(d_y) * tl.maximum(d_y + h, FLOOR)
    grad = tl.where(valid, tl.where(mine, at_target, grad), 0.0)
    tl.store(out + row * out_stride + column, grad.to(out.dtype.element_ty), mask=column < num_columns)


def _adjacent(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] <= 1 else logits.contiguous()


def _floats(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def vocab_stats(logits: Tensor, target: Tensor, softmax: Softmax, want_entropy: bool) -> Tensor:
    """See `megappo.ops.vocab_stats.vocab_stats`."""
    check_arguments(logits, target, softmax)
    vocab_start, num_valid, inv_temp, row_inv_temp, ignore_index = softmax
    num_tokens = logits.shape[0]
    count = triton.cdiv(num_valid, SEGMENT)
    out = logits.new_empty((num_tokens, 4), dtype=torch.float32)
    if count == 0 or num_tokens == 0:
        out[:, 1:3], out[:, 0::3] = 0.0, -torch.inf
        return out
    # Segments of about equal length that start at whole 32 bytes of bf16.
    columns = triton.cdiv(triton.cdiv(num_valid, count), 16) * 16
    segments = out if count == 1 else logits.new_empty((num_tokens, count, 4), dtype=torch.float32)
    lanes = min(LANES, max(16, triton.next_power_of_2(num_valid)))
    x = _adjacent(logits)
    _segments[(num_tokens * count,)](
        x,
        x.stride(0),
        target.contiguous(),
        _floats(row_inv_temp),
        inv_temp,
        segments,
        count,
        columns,
        vocab_start,
        num_valid,
        ignore_index,
        PER_ROW=row_inv_temp is not None,
        ENTROPY=want_entropy,
        LANES=lanes,
        ROWS=min(ROWS, triton.next_power_of_2(triton.cdiv(num_valid, lanes))),
    )
    if count > 1:
        _fold[(triton.cdiv(num_tokens, ROWS_PER_PROGRAM),)](segments, out, num_tokens, count, BLOCK=ROWS_PER_PROGRAM)
    return out


def vocab_stats_merge(gathered: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `megappo.ops.vocab_stats.vocab_stats_merge`."""
    check_gathered(gathered, target)
    num_ranks, num_tokens, _ = gathered.shape
    logprob, entropy, lse = (gathered.new_empty(num_tokens) for _ in range(3))
    if num_tokens:
        _merge[(triton.cdiv(num_tokens, ROWS_PER_PROGRAM),)](
            gathered.contiguous(),
            target.contiguous(),
            logprob,
            entropy,
            lse,
            num_ranks,
            num_tokens,
            ignore_index,
            BLOCK=ROWS_PER_PROGRAM,
        )
    return logprob, entropy, lse


def _backward_into(out: Tensor, logits: Tensor, target: Tensor, upstream: Upstream, softmax: Softmax) -> None:
    check_arguments(logits, target, softmax, **upstream._asdict())
    vocab_start, num_valid, inv_temp, row_inv_temp, ignore_index = softmax
    num_tokens, num_columns = logits.shape
    if num_tokens == 0 or num_columns == 0:
        return
    block = min(BACKWARD_BLOCK, triton.next_power_of_2(num_columns))
    blocks = triton.cdiv(num_columns, block)
    x = _adjacent(logits)
    _backward[(num_tokens * blocks,)](
        x,
        x.stride(0),
        target.contiguous(),
        *(_floats(x) for x in upstream),
        _floats(row_inv_temp),
        inv_temp,
        out,
        out.stride(0),
        blocks,
        num_columns,
        vocab_start,
        num_valid,
        ignore_index,
        PER_ROW=row_inv_temp is not None,
        ENTROPY=upstream.g_entropy is not None,
        BLOCK=block,
    )


def vocab_logits_backward(logits: Tensor, target: Tensor, upstream: Upstream, softmax: Softmax) -> Tensor:
    """See `megappo.ops.vocab_stats.vocab_logits_backward`."""
    out = logits.new_empty(logits.shape)
    _backward_into(out, logits, target, upstream, softmax)
    return out


def vocab_logits_backward_(logits: Tensor, target: Tensor, upstream: Upstream, softmax: Softmax) -> None:
    """See `megappo.ops.vocab_stats.vocab_logits_backward_`."""
    check_overwritable(logits)
    _backward_into(logits, logits, target, upstream, softmax)


def vocab_logits_backward_into(logits: Tensor, target: Tensor, upstream: Upstream, softmax: Softmax, out: Tensor) -> None:
    """See `megappo.ops.vocab_stats.vocab_logits_backward_into`."""
    check_out(logits, out)
    _backward_into(out, logits, target, upstream, softmax)
