"""GAE as others compute it, in plain PyTorch and Python, and in fp64 as the oracle: all over the same packed batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GAMMA, LAMBDA = 0.999, 0.95


@dataclass(frozen=True)
class Batch:
    """Per-token values [T] fp32, mask [T] bool, cu_seqlens [B+1] int32 (also as numbers, for the loops)."""

    reward: Tensor
    value: Tensor
    mask: Tensor
    cu_seqlens: Tensor
    bounds: tuple[int, ...]


def lists_of(tensors: Sequence[Tensor], start: int, end: int) -> list[list[float]]:
    return [tensor[start:end].tolist() for tensor in tensors]


def python_loop(batch: Batch, num_sequences: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(advantage, returns) of the first sequences, a Python number at a time. In fp64 it is the oracle."""
    advantages: list[float] = []
    returns: list[float] = []
    for start, end in zip(batch.bounds[:num_sequences], batch.bounds[1 : num_sequences + 1]):
        reward, value, mask = lists_of((batch.reward, batch.value, batch.mask), start, end)
        running = next_value = 0.0
        own = [0.0] * (end - start)
        for t in range(end - start - 1, -1, -1):
            if mask[t]:
                running = reward[t] + GAMMA * next_value - value[t] + GAMMA * LAMBDA * running
                next_value = value[t]
                own[t] = running
        advantages += own
        returns += [a + v if m else 0.0 for a, v, m in zip(own, value, mask)]
    device = batch.value.device
    return torch.tensor(advantages, dtype=dtype, device=device), torch.tensor(returns, dtype=dtype, device=device)


def tensor_loop(batch: Batch, num_sequences: int) -> tuple[Tensor, Tensor]:
    """The same with an element of a tensor at a time, as trainers write it for one sequence."""
    advantage = torch.zeros(batch.bounds[num_sequences], device=batch.value.device)
    for start, end in zip(batch.bounds[:num_sequences], batch.bounds[1 : num_sequences + 1]):
        running = next_value = torch.zeros((), device=batch.value.device)
        for t in range(end - 1, start - 1, -1):
            kept = batch.mask[t]
            delta = batch.reward[t] + GAMMA * next_value - batch.value[t]
            running = torch.where(kept, delta + GAMMA * LAMBDA * running, running)
            next_value = torch.where(kept, batch.value[t], next_value)
            advantage[t] = torch.where(kept, running, 0.0)
    mask = batch.mask[: advantage.numel()]
    return advantage, torch.where(mask, advantage + batch.value[: advantage.numel()], 0.0)


def padded(batch: Batch, *, time_major: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(reward, value, mask) as [B, L], or [L, B] so that a step of the loop reads neighbouring memory."""
    lengths = torch.diff(batch.cu_seqlens).long()
    where = _where(batch, lengths)
    out = []
    for tensor in (batch.reward, batch.value, batch.mask):
        full = tensor.new_zeros(len(lengths), int(lengths.max()))
        full[where] = tensor
        out.append(full.t().contiguous() if time_major else full)
    return out[0], out[1], out[2]


def packed(batch: Batch, full: Tensor, *, time_major: bool) -> Tensor:
    """[T] of what `padded` laid out."""
    return (full.t() if time_major else full)[_where(batch, torch.diff(batch.cu_seqlens).long())]


def _where(batch: Batch, lengths: Tensor) -> tuple[Tensor, Tensor]:
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    position = torch.arange(batch.value.numel(), device=lengths.device) - batch.cu_seqlens.long()[sequence]
    return sequence, position


def padded_loop(reward: Tensor, value: Tensor, mask: Tensor, *, time_major: bool) -> tuple[Tensor, Tensor]:
    """A loop over time on all sequences at once, as verl, TRL and OpenRLHF write it, with verl's treatment of masked tokens."""
    dim = 0 if time_major else 1
    kept = mask.to(value.dtype)
    running = next_value = torch.zeros(value.shape[1 - dim], device=value.device)
    steps = []
    for t in range(value.shape[dim] - 1, -1, -1):
        r, v, m = (x.select(dim, t) for x in (reward, value, kept))
        fresh = r + GAMMA * next_value - v + GAMMA * LAMBDA * running
        running = fresh * m + (1 - m) * running
        next_value = v * m + (1 - m) * next_value
        steps.append(running)
    advantage = torch.stack(steps[::-1], dim) * kept
    return advantage, (advantage + value) * kept


def advance(total: Tensor, factor: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """A pass of `doubling`: the part that torch.compile fuses."""
    total = torch.cat((total[:-step] + factor[:-step] * total[step:], total[-step:]))
    return total, torch.cat((factor[:-step] * factor[step:], torch.zeros_like(factor[-step:])))


def doubling(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    one_pass: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = advance,
) -> tuple[Tensor, Tensor]:
    """Pointer jumping over the packed batch: log2(T) passes, in pass k a token adds the sum of the token 2^k further on. In fp32,
    on the sampled tokens only, so that the next token is the neighbour."""
    index = mask.nonzero()[:, 0]
    r, v = reward[index], value[index]
    sequence = torch.searchsorted(cu_seqlens[1:].long(), index, right=True)
    last = torch.ones_like(sequence, dtype=torch.bool)
    last[:-1] = sequence[1:] != sequence[:-1]
    next_value = torch.where(last, 0.0, torch.cat((v[1:], v.new_zeros(1))))
    total = r + GAMMA * next_value - v
    factor = torch.where(last, 0.0, GAMMA * LAMBDA)
    step, longest = 1, min(int(torch.diff(cu_seqlens).max()), index.numel())
    while step < longest:
        total, factor = one_pass(total, factor, step)
        step *= 2
    advantage, returns = torch.zeros_like(value), torch.zeros_like(value)
    advantage[index] = total
    returns[index] = total + v
    return advantage, returns
