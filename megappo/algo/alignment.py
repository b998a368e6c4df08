"""Alignment of model outputs to tokens: no other file shifts.
A causal model's output at position t-1 is about token x_t. Every per-token field of megappo is stored at its own token: log
pi(x_t | x_<t) and V(x_<t) at t. Training without this shift raises no error (docs/engines.md)."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Target of an output that predicts no token: its log-prob is 0."""


def first_token_mask(num_tokens: int, cu_seqlens: Tensor) -> Tensor:
    """Mask of the first token of every sequence, [T] bool."""
    # One slot more, for the starts of empty sequences at the end of the batch.
    first = torch.zeros(num_tokens + 1, dtype=torch.bool, device=cu_seqlens.device)
    first[cu_seqlens.long()] = True
    return first[:num_tokens]


def shift_right(output: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Move model outputs [T, ...] to their tokens: out[t] = output[t-1] in each sequence, 0 at its first token. Differentiable."""
    before = torch.cat((output[:1], output[:-1]))
    first = first_token_mask(output.shape[0], cu_seqlens)
    return torch.where(first.view(-1, *(1,) * (output.dim() - 1)), 0.0, before)


def align_values(output: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Split the value head's output [T, ...] into (value [T, ...], bootstrap [B, ...]), differentiable.
    value[t] = V(x_<t) = output[t-1], 0 at the first token. bootstrap[b] is the output at the last token of sequence b: the value
    after the whole response, 0 for an empty sequence. The caller uses it only for responses that the length limit cut."""
    value = shift_right(output, cu_seqlens)
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    # Empty sequences take one extra output, of value 0.
    padded = torch.cat((output, output.new_zeros(1, *output.shape[1:])))
    last = torch.where(ends > starts, ends - 1, output.shape[0])
    return value, padded[last]


def next_token_targets(tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Target of the output at t, [T] int64: tokens[t+1] within the sequence, IGNORE_INDEX at its last token.
    `shift_right` moves the log-probs of these targets back to their own tokens."""
    return shift_left(tokens, cu_seqlens, IGNORE_INDEX)


def shift_left(field: Tensor, cu_seqlens: Tensor, fill: int) -> Tensor:
    """Move a field of tokens [T, ...] to the outputs that predict them: out[t] = field[t+1] in each sequence, `fill` at its last
    token."""
    after = torch.cat((field[1:], field[:1]))
    last = torch.ones(field.shape[0], dtype=torch.bool, device=field.device)
    last[:-1] = first_token_mask(field.shape[0], cu_seqlens)[1:]
    return after.masked_fill(last.view(-1, *(1,) * (field.dim() - 1)), fill)
