"""Vocabulary shard of one tensor-parallel rank, and the collectives over its group.
Statistics of the shards (`vocab_stats.py`, `linear_stats.py`) are gathered and merged here, so that every rank holds the same
bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import megappo.ops.vocab_stats  # noqa: F401  registers torch.ops.megappo.vocab_*


@dataclass(frozen=True)
class VocabShard:
    """Part of the vocabulary on this rank, and the scale of its logits."""

    start: int
    num_valid: int
    inv_temp: float
    ignore_index: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)


def inverse_temperature(temperature: float | Tensor, target: Tensor) -> tuple[float, Tensor | None]:
    """1 / temperature as (number, None), or as (1.0, [T] fp32) for one per row. Raises ValueError unless > 0 or of shape [T]."""
    if isinstance(temperature, Tensor):
        if temperature.shape != target.shape:
            raise ValueError(f"temperature {tuple(temperature.shape)} is not one value for each of {target.numel()} tokens")
        return 1.0, temperature.detach().float().reciprocal()
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} cannot divide logits: log-probs need a positive temperature")
    return 1.0 / temperature, None


def merge_shards(stats: Tensor, target: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the shards' statistics [T, 4] and merge them to (logprob, entropy, lse), each [T].
    Collective over the group: one all-gather of 16 bytes per token and rank. Raises ValueError, on the CPU only, for a target
    that no shard owns."""
    if shard.size == 1:
        gathered = stats[None]
    else:
        # [R * T, 4] because gloo concatenates along the first axis; in memory that is [R, T, 4]
        flat = stats.new_empty(shard.size * stats.shape[0], 4)
        dist.all_gather_into_tensor(flat, stats, group=shard.group)
        gathered = flat.view(shard.size, -1, 4)
    logprob, entropy, lse = torch.ops.megappo.vocab_stats_merge(gathered, target, shard.ignore_index)
    # A GPU would have to synchronise; there the engine's finite vote meets a log-prob of -inf.
    if stats.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_owned(gathered, target, shard.ignore_index)
    return logprob, entropy, lse


def _check_owned(gathered: Tensor, target: Tensor, ignore_index: int) -> None:
    # Every rank has the same `gathered`, so all ranks raise together.
    lost = (gathered[:, :, 3] == -torch.inf).all(0) & (target != ignore_index)
    if bool(lost.any()):
        at = int(lost.nonzero()[0, 0])
        raise ValueError(
            f"target {int(target[at])} of token {at} is outside the vocabulary, not among its kept ids, or has logit -inf "
            f"({int(lost.sum())} such tokens); use {ignore_index} for tokens without a target"
        )


def gather_rows(local: Tensor, shard: VocabShard) -> Tensor:
    """Gather [T/tp, H] of each rank to [T, H] in rank order. Collective over the group."""
    out = local.new_empty(shard.size * local.shape[0], local.shape[1])
    dist.all_gather_into_tensor(out, local.contiguous(), group=shard.group)
    return out


def reduce_scatter_rows(full: Tensor, shard: VocabShard) -> Tensor:
    """Sum [T, H] over the ranks and return this rank's [T/tp, H] of the sum. Collective over the group."""
    out = full.new_empty(full.shape[0] // shard.size, full.shape[1])
    dist.reduce_scatter_tensor(out, full, group=shard.group)
    return out
