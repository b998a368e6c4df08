"""Differentiable log-prob and entropy of target tokens over a vocabulary sharded over a tensor-parallel group.

`vocab_parallel_logprob` starts from logits, `linear_logprob` (`linear_logprob.py`) from hidden states and the output weight. Both
make exactly one all-gather of 16 bytes per token and rank in the forward; all ranks then hold the same bits. Arithmetic is in
`vocab_stats.py`, the group in `vocab_shard.py`; this file checks arguments and holds the autograd pair. `algo/alignment.py`
assigns targets to tokens. `kept` (`kept_ids.py`) restricts a row to the ids that a sampler with top-k or top-p kept.

Temperature divides the logits. Targets equal to `ignore_index` have log-prob, entropy and gradient 0. The upstream gradients must
be the same on all ranks of the group, as they are for a loss that every rank computes from the same log-probs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megappo.algo.alignment import IGNORE_INDEX
from megappo.ops.kept_ids import check_kept, restrict_
from megappo.ops.linear_logprob import linear_logprob
from megappo.ops.vocab_shard import VocabShard, inverse_temperature, merge_shards
from megappo.ops.vocab_stats import check_arguments

__all__ = ["IGNORE_INDEX", "linear_logprob", "vocab_parallel_logprob"]


def vocab_parallel_logprob(
    logits: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None,
    *,
    vocab_start: int,
    num_valid: int,
    temperature: float | Tensor = 1.0,
    want_entropy: bool = True,
    ignore_index: int = IGNORE_INDEX,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(logprob [T], entropy [T] or None), fp32, the same on every rank of the group and differentiable with respect to `logits`.

    logits: [T, Vl], this rank's columns, bf16/fp16/fp32; the first `num_valid` are vocabulary entries vocab_start.., the rest
    padding. target: [T] ids of the whole vocabulary, the same on all ranks. group: None or the tensor-parallel group.
    temperature: a positive number, or [T]. want_entropy false saves a pass and returns None for the entropy.
    kept: [T, K] ids of the whole vocabulary that the target of each row was drawn from, -1 for no entry; a row of only -1 is not
    restricted. All other logits count as -inf.

    Raises ValueError for shapes that do not fit and, on the CPU, for a target outside the vocabulary or its `kept` (or with logit
    -inf), naming the token. On a GPU that check would synchronise; there such a target gives logprob -inf, and the engine's finite
    vote skips the step.
    """
    target = target if target.is_floating_point() else target.long()  # the check below names a float type
    check_arguments(logits, target, num_valid, temperature=temperature if isinstance(temperature, Tensor) else None)
    check_kept(kept, target)
    inv_temp, row_inv_temp = inverse_temperature(temperature, target)
    shard = VocabShard(vocab_start, num_valid, inv_temp, ignore_index, group)
    return _VocabParallelLogprob.apply(logits, target, row_inv_temp, kept, shard, want_entropy)


def _restricted(logits: Tensor, kept: Tensor | None, shard: VocabShard) -> Tensor:
    """The valid columns with -inf outside `kept`, in a copy; `logits` itself without restriction."""
    if kept is None:
        return logits
    copy = logits.clone()  # the caller's logits stay: the backward restricts them again instead of keeping this copy
    restrict_(copy[:, : shard.num_valid], kept, shard.start)
    return copy


class _VocabParallelLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, row_inv_temp, kept, shard, want_entropy):
        stats = torch.ops.megappo.vocab_stats(
            _restricted(logits, kept, shard),
            target,
            shard.start,
            shard.num_valid,
            shard.inv_temp,
            row_inv_temp,
            shard.ignore_index,
            want_entropy,
        )
        logprob, entropy, lse = merge_shards(stats, target, shard)
        ctx.save_for_backward(logits, target, row_inv_temp, kept, lse, entropy)
        ctx.shard = shard
        ctx.set_materialize_grads(False)  # a loss without entropy then gives g_entropy None, and the backward is cheaper
        return logprob, entropy if want_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx, g_logprob, g_entropy):
        logits, target, row_inv_temp, kept, lse, entropy = ctx.saved_tensors
        shard = ctx.shard
        if g_logprob is None:
            g_logprob = torch.zeros_like(lse)
        grad = torch.ops.megappo.vocab_logits_backward(
            _restricted(logits, kept, shard),
            target,
            lse,
            entropy,
            g_logprob,
            g_entropy,
            shard.start,
            shard.num_valid,
            shard.inv_temp,
            row_inv_temp,
            shard.ignore_index,
        )
        return grad, None, None, None, None, None
