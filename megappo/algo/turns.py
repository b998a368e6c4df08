"""Turns of a response: the time steps of turn-level advantages (Turn-PPO, Li et al. 2025, arXiv:2512.17008).

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
