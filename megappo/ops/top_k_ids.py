"""Logits restricted to the ids that a sampler with top-k or top-p could choose: the distribution that the tokens were drawn from.
`kept` [T, K] int32 or int64 lists, per target, the ids of the whole vocabulary that the sampler kept; -1 is no entry, and a row
of only -1 is not restricted. Every other logit is -inf: probability 0, gradient 0."""

from __future__ import annotations

import torch
from torch import Tensor

NO_ENTRY = -1


def check_top_k_ids(kept: Tensor | None, target: Tensor) -> None:
    """Raise ValueError unless `kept` has a row of ids for each target."""
    if kept is None:
        return
    if kept.dim() != 2 or kept.shape[0] != target.shape[0] or kept.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"kept {tuple(kept.shape)} {kept.dtype}: want int32 or int64 ids [{target.shape[0]}, K], a row for each target"
        )


def restrict_(logits: Tensor, kept: Tensor, vocab_start: int) -> Tensor:
    """Set logits [T, V] to -inf, in place, at each column whose id (vocab_start + column) a restricted row does not list."""
    num_columns = logits.shape[1]
    if kept.shape[1] == 0 or num_columns == 0:
        return logits
    restricted = (kept != NO_ENTRY).any(1)
    column = kept.long() - vocab_start
    here = (column >= 0) & (column < num_columns)
    # In bounds for gather and scatter; what was clamped is written as -inf, which changes no column.
    column = column.clamp(0, num_columns - 1)
    listed = logits.gather(1, column).masked_fill_(~here, -torch.inf)
    logits.masked_fill_(restricted[:, None], -torch.inf)
    # amax: an id of another shard, or none, writes -inf, which changes nothing; no [T, V] mask, no synchronisation with a GPU
    return logits.scatter_reduce_(1, column, listed, "amax")
