"""Chains: trajectories that are several sequences, since their context was compacted in between (CompactionRL, arXiv:2607.05378).

The state after the last token of a sequence is the first state of the next one: the summary is written, and the policy goes on from
the compacted context. So advantages run over the sampled tokens of all sequences as over those of one, and the reward of a
trajectory is on its last token. Laid end to end, a chain is one sequence whose contexts are tokens that were not sampled, which
every scan over a mask skips (`gae.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor


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
