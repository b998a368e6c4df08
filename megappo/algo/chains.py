"""Chains: trajectories that are several sequences, since their context was compacted in between (CompactionRL, arXiv:2607.05378).

The state after the last token of a sequence is the first state of the next one: the summary is written, and the policy goes on from
the compacted context. So advantages run over the sampled tokens of all sequences as over those of one, and the reward of a
trajectory is on its last token. Laid end to end, a chain is one sequence whose contexts are tokens that were not sampled, which
every scan over a mask skips (`gae.py`).

Turns of a response: the time steps of turn-level advantages (Turn-PPO, Li et al. 2025, arXiv:2512.17008).

A turn is a maximal run of sampled tokens of a sequence, between two observations (prompt, output of a tool). Turn-PPO takes a turn
as one action: its state is all tokens before it, its reward the sum of its tokens' rewards. GAE then runs over the first tokens of
turns as its steps (`ops.advantages.token_advantages`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def turn_starts(response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] bool, true at the first token of every turn. response_mask: [T] bool, cu_seqlens: [B+1]."""
    follows = torch.zeros_like(response_mask)
    follows[1:] = response_mask[:-1]
    first = cu_seqlens[:-1].long()
    # An empty sequence at the end starts behind the last token.
    follows[first[first < response_mask.numel()]] = False
    return response_mask & ~follows


def over_turns(values: Tensor, response_mask: Tensor, starts: Tensor) -> Tensor:
    """[T], at every sampled token the entry of values [T] at the first token of its turn, 0 elsewhere."""
    turn = starts[response_mask].long().cumsum(0) - 1  # number, in the order of the batch, of every sampled token's turn
    spread = torch.zeros_like(values)
    spread[response_mask] = values[starts][turn]
    return spread


def last_of_chains(previous: Tensor) -> Tensor:
    """[N] int64, number of the last sequence of the chain of each: itself, if none goes on from it.

    previous: [N], number of the sequence that each goes on from, -1 of the first of a chain. ValueError for a number out of range,
    two sequences that go on from one, or a ring.
    """
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
    """(order [N] int64, counts [C] int64): sequences chain by chain, each from its first to its last; sequences of each chain.
    Chains are in the order of their last sequences.

    previous, errors: as in `last_of_chains`.
    """
    last = last_of_chains(previous)
    depth = torch.zeros_like(last)
    at = previous.long()
    while bool((at >= 0).any()):
        depth += at >= 0
        at = torch.where(at >= 0, previous.long()[at.clamp(min=0)], -1)
    order = torch.argsort(last * (int(depth.max()) + 1 if len(depth) else 1) + depth)
    _, counts = last[order].unique_consecutive(return_counts=True)
    return order, counts
