"""Chains of sequences, which are trajectories with compacted contexts, and turns as the time steps of an advantage.
The state after the last token of a sequence is the first state of the next one in its chain. Laid end to end, a chain is one
sequence whose contexts were not sampled, which every scan over a mask skips (`gae.py`); its reward is on the last token
(CompactionRL, arXiv:2607.05378)."""

from __future__ import annotations

import torch
from torch import Tensor


def turn_starts(response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mask of the first token of every turn, [T] bool. response_mask: [T] bool, cu_seqlens: [B+1].

    A turn is a maximal run of sampled tokens of a sequence, between two observations (prompt, output of a tool). Turn-PPO takes a
    turn as one action: its state is all tokens before it, its reward the sum of its tokens' rewards (Li et al. 2025,
    arXiv:2512.17008).
    """
    # One entry more: an empty sequence at the end starts behind the last token.
    follows = torch.nn.functional.pad(response_mask, (1, 0))
    follows.index_fill_(0, cu_seqlens[:-1].long(), False)
    return response_mask & ~follows[:-1]


def over_turns(values: Tensor, response_mask: Tensor, starts: Tensor) -> Tensor:
    """Spread values [T] from the first token of each turn to all its sampled tokens, [T]; 0 elsewhere."""
    # Not by masks, whose number of true entries the host would wait for on a device.
    start = torch.where(starts, torch.arange(len(starts), device=starts.device), 0).cummax(0).values
    return torch.where(response_mask, values[start], 0.0)


def last_of_chains(previous: Tensor) -> Tensor:
    """Last sequence of each sequence's chain, [N] int64 numbers: its own if no sequence continues it.
    previous: [N], number of the sequence that each one continues, -1 at the start of a chain. Raises ValueError for a number out
    of range, two sequences that continue the same one, or a ring."""
    count = previous.numel()
    previous = previous.long()
    named = previous[previous >= 0]
    if bool((previous >= count).any()) or len(named.unique()) < len(named):
        raise ValueError(f"chains: {previous.tolist()} names a sequence twice, or one beyond {count - 1}")
    last = torch.arange(count, device=previous.device)
    following = last.clone()
    following[named] = (previous >= 0).nonzero().flatten()
    # Pointer jumping: after k passes each sequence has looked 2^k further.
    for _ in range(count.bit_length()):
        following = following[following]
    if bool(torch.isin(following, named).any()):
        raise ValueError(f"chains: {previous.tolist()} has sequences that go on from each other in a ring")
    return following


def order_of_chains(previous: Tensor) -> tuple[Tensor, Tensor]:
    """Order sequences by chain: (order [N] int64, each chain from its first to its last; counts [C] int64, sequences per chain).
    Chains are in the order of their last sequences. previous, errors: as in `last_of_chains`."""
    last = last_of_chains(previous)
    depth = torch.zeros_like(last)
    at = previous.long()
    while bool((at >= 0).any()):
        depth += at >= 0
        at = torch.where(at >= 0, previous.long()[at.clamp(min=0)], -1)
    order = torch.argsort(last * (int(depth.max()) + 1 if len(depth) else 1) + depth)
    _, counts = last[order].unique_consecutive(return_counts=True)
    return order, counts
