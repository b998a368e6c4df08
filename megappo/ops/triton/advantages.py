"""Triton twin of `ops/advantages.py`: the recurrence as a reverse `associative_scan` over tiles of the packed batch.

A token is an affine map of x, what the tokens after it contribute to its advantage (csrc/advantages/advantages.h); maps compose,
and the end of a sequence cuts. Slot t holds the map of token t + 1, so an inclusive scan gives the x of token t. Four launches:
maps of tiles, x carried over the tiles from the right, the tiles again with their x, moments. Inputs are read twice (30 bytes a
token without a KL, csrc/advantages/cuda.cu moves 21): this portable fallback needs no communication between running programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megappo.algo import kl
from megappo.algo.gae import Lambdas, Rewards, TimeSteps
from megappo.ops.advantages import KERNEL_ESTIMATORS

BLOCK = 1024  # tokens of a tile
TILES_AT_ONCE = 1024  # tiles per iteration of the single-program kernels
# Flags of a map.
CUT = tl.constexpr(1)  # an end of a sequence: the map ignores everything to its right
SEEN = tl.constexpr(2)  # has sampled tokens of the sequence at its left edge
# KIND of `_token`; 1 and up: the reward has minus the KL estimate of that index.
NO_KL = tl.constexpr(0)
MAX_LOG_RATIO = tl.constexpr(kl.MAX_LOG_RATIO)


@triton.jit
def _compose(a_right, c_right, a2_right, c2_right, flags_right, a, c, a2, c2, flags):
    """Compose the maps of two neighbouring stretches; a reverse scan passes the right one first."""
    cut = (flags & CUT) != 0
    return (
        tl.where(cut, a, a * a_right),
        tl.where(cut, c, a * c_right + c),
        tl.where(cut, a2, a2 * a2_right),
        tl.where(cut, c2, a2 * c2_right + c2),
        tl.where(cut, flags, flags | flags_right),
    )


@triton.jit
def _first(x, slot):
    return tl.sum(tl.where(slot == 0, x, tl.zeros_like(x)), axis=0)


@triton.jit
def _search(cu_seqlens, t, num_sequences):
    """Find the sequence of one token: the number of entries of cu_seqlens[1..] at or before it."""
    low, high = num_sequences * 0, num_sequences
    while low < high:
        middle = (low + high) // 2
        passed = tl.load(cu_seqlens + middle + 1) <= t
        low = tl.where(passed, middle + 1, low)
        high = tl.where(passed, high, middle)
    return tl.minimum(low, num_sequences - 1)


@triton.jit
def _search_all(cu_seqlens, at, inside, low_sequence, high_sequence):
    """Find the sequences of a tile's tokens, between those of its first and last token."""
    low, high = tl.zeros_like(at) + low_sequence, tl.zeros_like(at) + high_sequence
    width = high_sequence - low_sequence
    while width > 0:
        middle = (low + high) // 2
        open_ = inside & (low < high)
        passed = tl.load(cu_seqlens + middle + 1, mask=open_, other=0) <= at
        low = tl.where(open_ & passed, middle + 1, low)
        high = tl.where(open_ & (passed == 0), middle, high)
        width = width // 2
    return low


@triton.jit
def _kl(log_ratio, KIND: tl.constexpr):
    if KIND == 1:
        return log_ratio
    elif KIND == 2:
        return 0.5 * log_ratio * log_ratio
    else:
        tl.static_assert(KIND == 3, "an estimator without a formula here")
        x = tl.where(-log_ratio > MAX_LOG_RATIO, MAX_LOG_RATIO, -log_ratio)
        # Triton has no expm1; near 0 the difference would cancel, so its series is used.
        series = 0.5 * x * x * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7)))))
        return tl.where(tl.abs(log_ratio) < 0.01, series, tl.exp(x) - 1.0 + log_ratio)


@triton.jit
def _token(batch, options, at, inside, kl_coef, KIND: tl.constexpr):
    """Load (sampled, step, reward, value) of each token; fp64, 0 if it was not sampled, and value 0 if it is no step."""
    logprob, ref_logprob, _, value, mask, _, _ = batch
    _, _, token_reward, steps, _, _ = options
    sampled = tl.load(mask + at, mask=inside, other=0) != 0
    step = sampled
    if steps is not None:
        step = sampled & (tl.load(steps + at, mask=inside, other=0) != 0)
    # Fields of tokens that were not sampled are not read: they are ignored, even if NaN.
    v = tl.load(value + at, mask=step, other=0.0).to(tl.float64)
    if KIND == NO_KL:
        r = tl.zeros_like(v)
    else:
        taken = tl.load(logprob + at, mask=sampled, other=0.0).to(tl.float64)
        reference = tl.load(ref_logprob + at, mask=sampled, other=0.0).to(tl.float64)
        r = tl.where(sampled, -(kl_coef * _kl(taken - reference, KIND)), 0.0)
    if token_reward is not None:
        r += tl.load(token_reward + at, mask=sampled, other=0.0).to(tl.float64)
    return sampled, step, r, v


@triton.jit
def _scan_tile(batch, options, num_tokens, num_sequences, numbers, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Scan this program's tile: (a, c, a2, c2, flags) from each slot to its right edge, and the slots' sequences.
    batch, options, numbers: parameters of `_maps`, in their order."""
    _, _, score, _, _, cu_seqlens, bootstrap = batch
    policy_each, critic_each, _, steps, weight, trace = options
    gamma, lam_policy, lam_value, kl_coef = numbers
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    inside = at < num_tokens
    last = tl.minimum(first + BLOCK, num_tokens) - 1
    sequence = _search_all(
        cu_seqlens, at, inside, _search(cu_seqlens, first, num_sequences), _search(cu_seqlens, last, num_sequences)
    )
    of_next = at + 1
    sampled, step, r, v = _token(batch, options, of_next, of_next < num_tokens, kl_coef, KIND)
    u, after = r - v, gamma * v
    decay = tl.zeros_like(v) + gamma
    decay2 = decay
    if policy_each is not None:
        decay = decay * tl.load(policy_each + sequence, mask=inside, other=0.0)
    else:
        decay = decay * lam_policy
    if critic_each is not None:
        decay2 = decay2 * tl.load(critic_each + sequence, mask=inside, other=0.0)
    else:
        decay2 = decay2 * lam_value
    if weight is not None:
        w = tl.load(weight + of_next, mask=step, other=1.0)
        decay, decay2 = decay * w, decay2 * w
    if trace is not None:
        kept = tl.load(trace + of_next, mask=step, other=1.0)
        decay, decay2 = decay * kept, decay2 * kept
    if steps is not None:
        decay, decay2 = tl.where(step, decay, 1.0), tl.where(step, decay2, 1.0)
    a, c = tl.where(sampled, decay, 1.0), tl.where(sampled, decay * u + after, 0.0)
    a2, c2 = tl.where(sampled, decay2, 1.0), tl.where(sampled, decay2 * u + after, 0.0)

    # Start of x at an end of a sequence: bootstrap and score.
    start = tl.load(score + sequence, mask=inside, other=0.0).to(tl.float64)
    if bootstrap is not None:
        start += gamma * tl.load(bootstrap + sequence, mask=inside, other=0.0).to(tl.float64)
    cut = inside & (at + 1 == tl.load(cu_seqlens + sequence + 1, mask=inside, other=0))
    flags = tl.where(cut, CUT, tl.where(sampled, SEEN, 0))
    a, a2 = tl.where(cut, 0.0, a), tl.where(cut, 0.0, a2)
    c, c2 = tl.where(cut, start, c), tl.where(cut, start, c2)
    a, c, a2, c2, flags = tl.associative_scan((a, c, a2, c2, flags), 0, _compose, reverse=True)
    return a, c, a2, c2, flags, sequence


@triton.jit
def _maps(
    logprob,
    ref_logprob,
    score,
    value,
    mask,
    cu_seqlens,
    bootstrap,
    policy_each,
    critic_each,
    token_reward,
    steps,
    weight,
    trace,
    maps,
    flags_out,
    faults,
    num_tokens,
    num_sequences,
    num_tiles,
    gamma: tl.float64,
    lam_policy: tl.float64,
    lam_value: tl.float64,
    kl_coef: tl.float64,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK)
    batch = (logprob, ref_logprob, score, value, mask, cu_seqlens, bootstrap)
    options = (policy_each, critic_each, token_reward, steps, weight, trace)
    numbers = (gamma, lam_policy, lam_value, kl_coef)
    a, c, a2, c2, flags, _ = _scan_tile(batch, options, num_tokens, num_sequences, numbers, KIND, BLOCK)
    tl.store(maps + tile, _first(a, slot))
    tl.store(maps + num_tiles + tile, _first(c, slot))
    tl.store(maps + 2 * num_tiles + tile, _first(a2, slot))
    tl.store(maps + 3 * num_tiles + tile, _first(c2, slot))
    tl.store(flags_out + tile, _first(flags, slot))
    # This tile's share of the check that cu_seqlens goes from 0 to num_tokens and never falls.
    share = tl.cdiv(num_sequences, num_tiles)
    fault = tl.where(tile == 0, (tl.load(cu_seqlens) != 0) | (tl.load(cu_seqlens + num_sequences) != num_tokens), 0).to(tl.int32)
    end = tl.minimum((tile + 1) * share, num_sequences)
    begin = tile * share
    while begin < end:
        i = begin + slot
        falls = tl.load(cu_seqlens + i, mask=i < end, other=0) > tl.load(cu_seqlens + i + 1, mask=i < end, other=0)
        fault += tl.sum(falls.to(tl.int32), axis=0)
        begin += BLOCK
    tl.store(faults + tile, fault)


@triton.jit
def _carry(maps, flags_in, faults, entries, seen_out, sound, num_tiles, BLOCK: tl.constexpr):
    """Compute x at the right edge of every tile, from the last tile to the first, in one program."""
    slot = tl.arange(0, BLOCK)
    x, x2 = tl.zeros((), dtype=tl.float64), tl.zeros((), dtype=tl.float64)
    seen, fault = tl.zeros((), dtype=tl.int32), tl.zeros((), dtype=tl.int32)
    begin = (tl.cdiv(num_tiles, BLOCK).to(tl.int64) - 1) * BLOCK
    while begin >= 0:
        tile = begin + slot
        # x at a tile's right edge comes from the maps of the tiles behind it, hence tile + 1; behind the last one is nothing.
        right = tile + 1 < num_tiles
        a, c, a2, c2, flags = tl.associative_scan(
            (
                tl.load(maps + tile + 1, mask=right, other=1.0),
                tl.load(maps + num_tiles + tile + 1, mask=right, other=0.0),
                tl.load(maps + 2 * num_tiles + tile + 1, mask=right, other=1.0),
                tl.load(maps + 3 * num_tiles + tile + 1, mask=right, other=0.0),
                tl.load(flags_in + tile + 1, mask=right, other=0),
            ),
            0,
            _compose,
            reverse=True,
        )
        cut = (flags & CUT) != 0
        entry, entry2 = tl.where(cut, c, a * x + c), tl.where(cut, c2, a2 * x2 + c2)
        seen_here = tl.where(cut, flags & SEEN, (flags & SEEN) | seen)
        tl.store(entries + tile, entry, mask=tile < num_tiles)
        tl.store(entries + num_tiles + tile, entry2, mask=tile < num_tiles)
        tl.store(seen_out + tile, seen_here, mask=tile < num_tiles)
        fault += tl.sum(tl.load(faults + tile, mask=tile < num_tiles, other=0), axis=0)
        x, x2, seen = _first(entry, slot), _first(entry2, slot), _first(seen_here, slot)
        begin -= BLOCK
    tl.store(sound, (fault == 0).to(tl.int32))


@triton.jit
def _apply(
    logprob,
    ref_logprob,
    score,
    value,
    mask,
    cu_seqlens,
    bootstrap,
    policy_each,
    critic_each,
    token_reward,
    steps,
    weight,
    trace,
    entries,
    seen_in,
    sound,
    reward,
    advantage,
    returns,
    partials,
    num_tokens,
    num_sequences,
    num_tiles,
    gamma: tl.float64,
    lam_policy: tl.float64,
    lam_value: tl.float64,
    kl_coef: tl.float64,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    batch = (logprob, ref_logprob, score, value, mask, cu_seqlens, bootstrap)
    options = (policy_each, critic_each, token_reward, steps, weight, trace)
    numbers = (gamma, lam_policy, lam_value, kl_coef)
    a, c, a2, c2, flags, sequence = _scan_tile(batch, options, num_tokens, num_sequences, numbers, KIND, BLOCK)
    # Slot t of the scan has the map of token t + 1; here each token's own reward and value.
    at = tile * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens
    sampled, step, r, v = _token(batch, options, at, inside, kl_coef, KIND)
    cut = (flags & CUT) != 0
    x = tl.where(cut, c, a * tl.load(entries + tile) + c)
    x2 = tl.where(cut, c2, a2 * tl.load(entries + num_tiles + tile) + c2)
    is_sound = tl.load(sound) != 0  # cu_seqlens are valid; otherwise all results are NaN
    of_policy, of_critic = r - v + x, r - v + x2
    if weight is not None:
        w = tl.load(weight + at, mask=step, other=1.0)
        of_policy, of_critic = w * of_policy, w * of_critic
    kept = tl.where(step, of_policy, 0.0).to(tl.float32)
    tl.store(advantage + at, tl.where(is_sound, kept, float("nan")), mask=inside)
    tl.store(returns + at, tl.where(is_sound, tl.where(step, of_critic + v, 0.0), float("nan")).to(tl.float32), mask=inside)
    seen = (flags & SEEN) | tl.where(cut, 0, tl.load(seen_in + tile))
    # The score belongs to the last sampled token: no sampled token of its sequence is to its right.
    at_end = tl.load(score + sequence, mask=sampled & (seen == 0), other=0.0).to(tl.float64)
    tl.store(reward + at, tl.where(is_sound, r + at_end, float("nan")).to(tl.float32), mask=inside)
    exact = kept.to(tl.float64)
    tl.store(partials + tile, tl.sum(step.to(tl.float64), axis=0))
    tl.store(partials + num_tiles + tile, tl.sum(exact, axis=0))
    tl.store(partials + 2 * num_tiles + tile, tl.sum(exact * exact, axis=0))


@triton.jit
def _add(partials, sound, moments, num_tiles, BLOCK: tl.constexpr):
    is_sound = tl.load(sound) != 0
    for row in tl.static_range(3):
        total = tl.zeros((BLOCK,), dtype=tl.float64)
        # In ascending order and without atomics: the bits depend on the tokens only.
        for begin in range(0, num_tiles, BLOCK):
            tile = begin + tl.arange(0, BLOCK)
            total += tl.load(partials + row * num_tiles + tile, mask=tile < num_tiles, other=0.0)
        tl.store(moments + row, tl.where(is_sound, tl.sum(total, axis=0), float("nan")))


def token_advantages(
    rewards: Rewards,
    value: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Tensor | None,
    lambdas: Lambdas,
    times: TimeSteps,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `megappo.ops.advantages.token_advantages`."""
    logprob, ref_logprob, score, token_reward, kl_estimator, kl_coef = rewards
    gamma, lam_policy, lam_value, *lambdas_each = lambdas
    # In the order of the kernels' parameters.
    batch = logprob, ref_logprob, score, value, response_mask, cu_seqlens, bootstrap
    given = (*batch, *lambdas_each, token_reward, *times)
    fields = [x if x is None else x.contiguous() for x in given]
    num_tokens, num_sequences = value.numel(), cu_seqlens.numel() - 1

    def empty(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=value.device)

    reward, advantage, returns = (empty(num_tokens, dtype=torch.float32) for _ in range(3))
    if num_tokens == 0:
        return reward, advantage, returns, empty(3).zero_()
    tiles = triton.cdiv(num_tokens, BLOCK)
    maps, entries, partials, moments = empty(4, tiles), empty(2, tiles), empty(3, tiles), empty(3)
    flags, faults, seen, sound = empty(4, tiles, dtype=torch.int32)
    numbers = gamma, lam_policy, lam_value, kl_coef
    kind = NO_KL.value if ref_logprob is None or kl_coef == 0.0 else KERNEL_ESTIMATORS.index(kl_estimator) + 1
    constants: dict[str, Any] = {"KIND": kind, "BLOCK": BLOCK}
    _maps[(tiles,)](*fields, maps, flags, faults, num_tokens, num_sequences, tiles, *numbers, **constants)
    _carry[(1,)](maps, flags, faults, entries, seen, sound, tiles, BLOCK=TILES_AT_ONCE)
    _apply[(tiles,)](
        *fields, entries, seen, sound, reward, advantage, returns, partials, num_tokens, num_sequences, tiles, *numbers, **constants
    )
    _add[(1,)](partials, sound, moments, tiles, BLOCK=TILES_AT_ONCE)
    return reward, advantage, returns, moments
