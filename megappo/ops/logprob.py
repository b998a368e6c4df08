"""Differentiable log-prob and entropy of target tokens over a vocabulary that is cut over a tensor-parallel group.

`vocab_parallel_logprob` starts from logits, `linear_logprob` from hidden states and the output weight. Both make exactly one
all-gather of 16 bytes per token and rank in the forward; all ranks then hold the same bits. Arithmetic is in `vocab_stats.py` and
`linear_stats.py`; this file checks arguments, talks to the group and holds the autograd pairs. Which targets belong to which
token is `algo/alignment.py`. `kept` (`kept_ids.py`) restricts a row to the ids that a sampler with top-k or top-p kept.

Temperature divides the logits. Targets equal to `ignore_index` have log-prob, entropy and gradient 0. The upstream gradients must
be the same on all ranks of the group, as they are for a loss that every rank computes from the same log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

import megappo.ops.linear_stats  # noqa: F401  registers torch.ops.megappo.linear_*
import megappo.ops.vocab_stats  # noqa: F401  registers torch.ops.megappo.vocab_*
from megappo.ops.kept_ids import check_kept, restrict_

IGNORE_INDEX = -100
LOGITS_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class VocabShard:
    """Which part of the vocabulary this rank holds, and how its logits are scaled."""

    start: int
    num_valid: int
    inv_temp: float
    ignore_index: int
    group: Optional[dist.ProcessGroup]

    @property
    def size(self) -> int:
        """Ranks that share the vocabulary; no group means one."""
        return 1 if self.group is None else dist.get_world_size(self.group)


def vocab_parallel_logprob(
    logits: Tensor,
    target: Tensor,
    group: Optional[dist.ProcessGroup],
    *,
    vocab_start: int,
    num_valid: int,
    temperature: float | Tensor = 1.0,
    want_entropy: bool = True,
    ignore_index: int = IGNORE_INDEX,
    kept: Optional[Tensor] = None,
) -> tuple[Tensor, Optional[Tensor]]:
    """(logprob [T], entropy [T] or None), fp32, the same on every rank of the group and differentiable with respect to `logits`.

    logits: [T, Vl], this rank's columns, bf16/fp16/fp32; the first `num_valid` are vocabulary entries vocab_start.., the rest
    padding. target: [T] ids of the whole vocabulary, the same on all ranks. group: None or the tensor-parallel group.
    temperature: a positive number, or [T]. want_entropy false saves a pass and returns None for the entropy.
    kept: [T, K] ids of the whole vocabulary that the target of each row was drawn from, -1 for no entry; a row of only -1 is not
    restricted. All other logits count as -inf.

    Raises ValueError for shapes that do not fit and, on the CPU, for a target outside the vocabulary or its `kept` (or with logit -inf), naming
    the token. On a GPU that check would wait for the device; there such a target gives logprob -inf, which the engine's finite
    vote stops.
    """
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} and target {tuple(target.shape)}: want [T, vocabulary] and [T]")
    if not 0 <= num_valid <= logits.shape[1]:
        raise ValueError(f"num_valid {num_valid} is not within the {logits.shape[1]} columns of this shard")
    check_kept(kept, target)
    inv_temp, row_inv_temp = _inverse(temperature, target)
    shard = VocabShard(vocab_start, num_valid, inv_temp, ignore_index, group)
    return _VocabParallelLogprob.apply(logits, target.long(), row_inv_temp, kept, shard, want_entropy)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    group: Optional[dist.ProcessGroup],
    *,
    sequence_parallel: bool = False,
    vocab_start: int,
    num_valid: int,
    temperature: float | Tensor = 1.0,
    chunk_tokens: int = 4096,
    want_entropy: bool = True,
    ignore_index: int = IGNORE_INDEX,
    logits_dtype: Literal["fp32", "bf16"] = "fp32",
    kept: Optional[Tensor] = None,
) -> tuple[Tensor, Optional[Tensor]]:
    """As `vocab_parallel_logprob` of hidden @ weight.T, holding at most chunk_tokens x Vl logits; they are recomputed in the
    backward.

    hidden: [T, H], the same on all ranks, or with sequence_parallel this rank's T/tp consecutive rows. weight: [Vl, H] of
    hidden's dtype. target: [T]. The gradient of `hidden` is summed over the group (sequence_parallel: reduce-scattered, so each
    rank gets its own rows), that of `weight` is this shard's, summed over tokens in fp32 and rounded to weight's dtype once.
    logits_dtype "bf16" rounds the logits to bf16 before temperature and softmax, where an inference engine in bf16 does; the
    gradient passes straight through the rounding.
    """
    tp = 1 if group is None else dist.get_world_size(group)
    num_tokens = hidden.shape[0] * (tp if sequence_parallel else 1)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or target.shape != (num_tokens,):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, target {tuple(target.shape)}: "
            f"want [T, H], [vocabulary, H], [T] (sequence_parallel={sequence_parallel}, tp {tp})"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight is {weight.dtype}: cast one of them")
    if not 0 <= num_valid <= weight.shape[0]:
        raise ValueError(f"num_valid {num_valid} is not within the {weight.shape[0]} rows of this shard")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
    if logits_dtype not in LOGITS_DTYPES:
        raise ValueError(f"logits_dtype {logits_dtype!r} is not one of {', '.join(LOGITS_DTYPES)}")
    check_kept(kept, target)
    inv_temp, row_inv_temp = _inverse(temperature, target)
    shard = VocabShard(vocab_start, num_valid, inv_temp, ignore_index, group)
    scatter = sequence_parallel and tp > 1
    bf16_logits = logits_dtype == "bf16"
    return _LinearLogprob.apply(
        hidden, weight, target.long(), row_inv_temp, kept, shard, want_entropy, bf16_logits, chunk_tokens, scatter
    )


def _restricted(logits: Tensor, kept: Optional[Tensor], shard: VocabShard) -> Tensor:
    """The valid columns with -inf outside `kept`, in a copy; `logits` itself without restriction."""
    if kept is None:
        return logits
    copy = logits.clone()
    restrict_(copy[:, : shard.num_valid], kept, shard.start)
    return copy


def _inverse(temperature: float | Tensor, target: Tensor) -> tuple[float, Optional[Tensor]]:
    if isinstance(temperature, Tensor):
        if temperature.shape != target.shape:
            raise ValueError(f"temperature {tuple(temperature.shape)} is not one value for each of {target.numel()} tokens")
        return 1.0, temperature.detach().float().reciprocal()
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} cannot divide logits: log-probs need a positive temperature")
    return 1.0 / temperature, None


def _merge(stats: Tensor, target: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the shards' statistics and merge them: the one collective of the forward."""
    if shard.size == 1:
        gathered = stats[None]
    else:
        # two axes because gloo concatenates along the first: [R * T, 4] is [R, T, 4]
        flat = stats.new_empty(shard.size * stats.shape[0], 4)
        dist.all_gather_into_tensor(flat, stats, group=shard.group)
        gathered = flat.view(shard.size, -1, 4)
    logprob, entropy, lse = torch.ops.megappo.vocab_stats_merge(gathered, target, shard.ignore_index)
    if stats.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_owned(gathered, target, shard.ignore_index)
    return logprob, entropy, lse


def _check_owned(gathered: Tensor, target: Tensor, ignore_index: int) -> None:
    """Every rank sees the same `gathered`, so all ranks raise together."""
    lost = (gathered[:, :, 3] == -torch.inf).all(0) & (target != ignore_index)
    if bool(lost.any()):
        at = int(lost.nonzero()[0, 0])
        raise ValueError(
            f"target {int(target[at])} of token {at} is outside the vocabulary, not among its kept ids, or has logit -inf "
            f"({int(lost.sum())} such tokens); use {ignore_index} for tokens without a target"
        )


class _VocabParallelLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, row_inv_temp, kept, shard, want_entropy):
        stats = torch.ops.megappo.vocab_stats(
            _restricted(logits, kept, shard), target, shard.start, shard.num_valid, shard.inv_temp, row_inv_temp, shard.ignore_index, want_entropy
        )
        logprob, entropy, lse = _merge(stats, target, shard)
        ctx.save_for_backward(logits, target, row_inv_temp, kept, lse, entropy)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        return logprob, entropy if want_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx, g_logprob, g_entropy):
        logits, target, row_inv_temp, kept, lse, entropy = ctx.saved_tensors
        shard = ctx.shard
        if g_logprob is None:
            g_logprob = torch.zeros_like(lse)
        grad = torch.ops.megappo.vocab_logits_backward(
            _restricted(logits, kept, shard), target, lse, entropy, g_logprob, g_entropy,
            shard.start, shard.num_valid, shard.inv_temp, row_inv_temp, shard.ignore_index,
        )
        return grad, None, None, None, None, None


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, row_inv_temp, kept, shard, want_entropy, bf16_logits, chunk_tokens, scatter):
        stats = torch.ops.megappo.linear_stats(
            _gather_rows(hidden, shard) if scatter else hidden, weight, target, shard.start, shard.num_valid, shard.inv_temp,
            row_inv_temp, shard.ignore_index, want_entropy, kept, bf16_logits, chunk_tokens,
        )
        logprob, entropy, lse = _merge(stats, target, shard)
        ctx.save_for_backward(hidden, weight, target, row_inv_temp, kept, lse, entropy)
        ctx.shard, ctx.bf16_logits, ctx.chunk_tokens, ctx.scatter = shard, bf16_logits, chunk_tokens, scatter
        ctx.set_materialize_grads(False)
        return logprob, entropy if want_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx, g_logprob, g_entropy):
        hidden, weight, target, row_inv_temp, kept, lse, entropy = ctx.saved_tensors
        shard = ctx.shard
        if g_logprob is None:
            g_logprob = torch.zeros_like(lse)
        dhidden, dweight = torch.ops.megappo.linear_logprob_backward(
            _gather_rows(hidden, shard) if ctx.scatter else hidden, weight, target, lse, entropy, g_logprob, g_entropy,
            shard.start, shard.num_valid, shard.inv_temp, row_inv_temp, shard.ignore_index, kept, ctx.bf16_logits,
            ctx.chunk_tokens,
        )
        if ctx.scatter:
            dhidden = _reduce_scatter_rows(dhidden, shard)
        elif shard.size > 1:
            dist.all_reduce(dhidden, group=shard.group)
        return dhidden, dweight.to(weight.dtype), *(None,) * 8


def _gather_rows(local: Tensor, shard: VocabShard) -> Tensor:
    """[T/tp, H] of each rank -> [T, H] in rank order."""
    out = local.new_empty(shard.size * local.shape[0], local.shape[1])
    dist.all_gather_into_tensor(out, local.contiguous(), group=shard.group)
    return out


def _reduce_scatter_rows(full: Tensor, shard: VocabShard) -> Tensor:
    """[T, H] partial sums on each rank -> this rank's [T/tp, H] of the sum."""
    out = full.new_empty(full.shape[0] // shard.size, full.shape[1])
    dist.reduce_scatter_tensor(out, full, group=shard.group)
    return out
