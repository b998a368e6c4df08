"""Log-prob and entropy from hidden states and the output weight, differentiable, over a tensor-parallel group.
This file checks arguments and holds the autograd pair; `linear_stats.py` and `vocab_stats.py` have the arithmetic,
`vocab_shard.py` the group, `algo/alignment.py` the targets of tokens. The upstream gradients must be the same on all ranks of
the group, as they are for a loss that every rank computes from the same log-probs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

import megappo.ops.linear_stats  # noqa: F401  registers torch.ops.megappo.linear_*
from megappo.algo.alignment import IGNORE_INDEX
from megappo.ops.gemm import compute_dtype
from megappo.ops.linear_blocks import LinearLogits, check_top_k_ids
from megappo.ops.linear_stats import backward_in_blocks
from megappo.ops.vocab_shard import VocabShard, gather_rows, inverse_temperature, merge_shards, reduce_scatter_rows
from megappo.ops.vocab_stats import Upstream

LOGITS_DTYPES = ("fp32", "bf16")
MODES = ("fast", "invariant")


@dataclass(frozen=True)
class LinearOptions:
    """Arguments of `linear_logprob` and `linear_token_loss` beside hidden states, weight, target and group."""

    vocab_start: int
    """Id, in the whole vocabulary, of the weight's first row."""
    num_valid: int
    """Rows of the weight that are vocabulary entries; the rest is padding."""
    sequence_parallel: bool = False
    """hidden is this rank's T/tp consecutive rows. Its gradient is reduce-scattered, so each rank gets its own rows."""
    temperature: float | Tensor = 1.0
    """Divides the logits: a positive number, or [T]."""
    chunk_tokens: int | None = None
    """Most tokens in a block of logits. None: 8 MB of logits on the CPU, 256 MB on a GPU; in `linear_token_loss` 512 and 4096
    tokens."""
    want_entropy: bool = True
    """False saves a pass."""
    ignore_index: int = IGNORE_INDEX
    """Target of rows whose log-prob, entropy and gradient are 0."""
    logits_dtype: Literal["fp32", "bf16"] = "fp32"
    """"bf16" rounds the logits to bf16 before temperature and softmax, as a bf16 inference engine does; the gradient passes
    straight through the rounding."""
    kept: Tensor | None = None
    """[T, K] ids that each row's target was drawn from (`linear_blocks.py`); all other logits count as -inf."""
    into_main_grad: bool = False
    """Add the weight's gradient to its fp32 accumulator; see `main_grad_of`."""
    mode: Literal["fast", "invariant"] = "fast"
    """"invariant" (`linear_logprob` only): the bits of a token's log-prob, entropy and row of hidden's gradient do not depend on
    the other tokens. Costs up to 128 (GPU: 1024) padded rows; chunk_tokens has no effect."""
    keep_logits: bool = False
    """`linear_logprob` only: spend [T, Vl] of memory (2 bytes a logit with bf16 logits of bf16 weights, else 4) instead of the
    fourth matrix product."""


@dataclass(frozen=True)
class LinearCall:
    """Arguments of one call beside its tensors."""

    shard: VocabShard
    bf16_logits: bool
    chunk_tokens: int
    scattered: bool
    """hidden is this rank's rows of sequence parallelism."""
    into_main_grad: bool
    invariant: bool = False
    keep_logits: bool = False

    def problem(
        self, hidden: Tensor, weight: Tensor, target: Tensor, row_inv_temp: Tensor | None, kept: Tensor | None
    ) -> LinearLogits:
        s = self.shard
        return LinearLogits(
            hidden,
            weight,
            target,
            s.start,
            s.num_valid,
            s.inv_temp,
            row_inv_temp,
            s.ignore_index,
            kept,
            self.bf16_logits,
            self.invariant,
        )

    def all_rows(self, hidden: Tensor) -> Tensor:
        """Hidden states [T, H] of all tokens. Collective over the group under sequence parallelism."""
        return gather_rows(hidden, self.shard) if self.scattered else hidden

    def sum_over_shards(self, dhidden: Tensor) -> Tensor:
        """Sum each rank's part of the gradient of all rows [T, H] to the gradient of this rank's `hidden`. Collective over the
        group."""
        if self.scattered:
            return reduce_scatter_rows(dhidden, self.shard)
        if self.shard.size > 1:
            dist.all_reduce(dhidden, group=self.shard.group)
        return dhidden


def linear_logprob(
    hidden: Tensor, weight: Tensor, target: Tensor, group: dist.ProcessGroup | None, options: LinearOptions
) -> tuple[Tensor, Tensor | None]:
    """Compute (logprob [T], entropy [T] or None) of softmax(hidden @ weight.T / temperature), fp32, equal on all ranks of the
    group.

    hidden: [T, H], the same on all ranks unless `sequence_parallel`. weight: [Vl, H] of hidden's dtype. target: [T] ids of the
    whole vocabulary. The [T, Vl] logits never exist: blocks of them are computed, and computed again in the backward. Collective
    over the group: the forward makes exactly one all-gather of 16 bytes per token and rank for the log-probs.

    The gradient of `hidden` is summed over the group; that of `weight` is this shard's, summed over tokens in fp32 and rounded to
    weight's dtype once.

    Raises ValueError for shapes that do not fit and, on the CPU, for a target outside the vocabulary or its `kept` (or with logit
    -inf), naming the token. A GPU would synchronise for that check; there such a target gives logprob -inf, and the engine's finite
    vote skips the step.
    """
    call = linear_call(hidden, weight, target, group, options)
    _, row_inv_temp = inverse_temperature(options.temperature, target)
    return _LinearLogprob.apply(hidden, weight, target.long(), row_inv_temp, options.kept, call, options.want_entropy)


def linear_call(
    hidden: Tensor, weight: Tensor, target: Tensor, group: dist.ProcessGroup | None, options: LinearOptions
) -> LinearCall:
    """Check the arguments of `linear_logprob` and collect all but the tensors. Raises ValueError for those that do not fit."""
    tp = 1 if group is None else dist.get_world_size(group)
    num_tokens = hidden.shape[0] * (tp if options.sequence_parallel else 1)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or target.shape != (num_tokens,):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, target {tuple(target.shape)}: "
            f"want [T, H], [vocabulary, H], [T] (sequence_parallel={options.sequence_parallel}, tp {tp})"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight is {weight.dtype}: cast one of them")
    if not 0 <= options.num_valid <= weight.shape[0]:
        raise ValueError(f"num_valid {options.num_valid} is not within the {weight.shape[0]} rows of this shard")
    if options.chunk_tokens is not None and options.chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, not {options.chunk_tokens}")
    if options.logits_dtype not in LOGITS_DTYPES:
        raise ValueError(f"logits_dtype {options.logits_dtype!r} is not one of {', '.join(LOGITS_DTYPES)}")
    if options.mode not in MODES:
        raise ValueError(f"mode {options.mode!r} is not one of {', '.join(MODES)}")
    if options.into_main_grad:
        main_grad_of(weight)
    check_top_k_ids(options.kept, target)
    inv_temp, _ = inverse_temperature(options.temperature, target)
    shard = VocabShard(options.vocab_start, options.num_valid, inv_temp, options.ignore_index, group)
    return LinearCall(
        shard,
        options.logits_dtype == "bf16",
        options.chunk_tokens or 0,  # the op's schema has an int: 0 is the device's default
        options.sequence_parallel and tp > 1,
        options.into_main_grad,
        options.mode == "invariant",
        options.keep_logits,
    )


def has_main_grad(weight: Tensor) -> bool:
    """True if `weight` has an accumulator for into_main_grad: fp32 (fp64 for fp64), of its shape."""
    main_grad = getattr(weight, "main_grad", None)
    return main_grad is not None and main_grad.dtype == compute_dtype(weight.dtype) and main_grad.shape == weight.shape


def main_grad_of(weight: Tensor) -> Tensor:
    """Return the fp32 accumulator [Vl, H] that Megatron's DistributedDataParallel attaches to a parameter; ValueError without one.
    With into_main_grad the weight's gradient is added there and not returned: Megatron's protocol of gradient accumulation
    fusion, completed by `handed_over`."""
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None or not has_main_grad(weight):
        raise ValueError(f"into_main_grad: weight {tuple(weight.shape)} has no fp32 main_grad of its shape; leave it to autograd")
    return main_grad


def handed_over(weight: Tensor) -> Tensor:
    """Placeholder that autograd gets for a gradient that is already in main_grad."""
    setattr(weight, "grad_added_to_main_grad", True)  # DDP's hook then does not add what we return
    # DDP's hook fires only if autograd has some gradient. Tied embeddings (`zero_out_wgrad`): autograd sums the gradients of both
    # uses before the hook adds them, so ours must be 0.
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        row_inv_temp: Tensor | None,
        kept: Tensor | None,
        call: LinearCall,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        keep_logits = call.keep_logits and (ctx.needs_input_grad[0] or ctx.needs_input_grad[1])  # nobody else reads them
        problem = call.problem(call.all_rows(hidden), weight, target, row_inv_temp, kept)
        stats, logits = torch.ops.megappo.linear_stats(*problem, want_entropy, keep_logits, call.chunk_tokens)
        logprob, entropy, lse = merge_shards(stats, target, call.shard)
        ctx.save_for_backward(hidden, weight, target, row_inv_temp, kept, lse, entropy, logits if keep_logits else None)
        ctx.call = call
        ctx.set_materialize_grads(False)  # a loss without entropy then gives g_entropy None, and the backward is cheaper
        return logprob, entropy if want_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logprob: Tensor | None, g_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, target, row_inv_temp, kept, lse, entropy, logits = ctx.saved_tensors
        call = ctx.call
        if g_logprob is None:  # a loss of the entropy alone
            g_logprob = torch.zeros_like(lse)
        # Rows are gathered again: kept, [T, H] would undo what sequence parallel saves.
        problem = call.problem(call.all_rows(hidden), weight, target, row_inv_temp, kept)
        upstream = Upstream(lse, entropy, g_logprob, g_entropy)
        if call.into_main_grad or not ctx.needs_input_grad[1]:
            main_grad = main_grad_of(weight) if call.into_main_grad else None
            dhidden = backward_in_blocks(problem, upstream, logits, call.chunk_tokens, main_grad, add=True)
            dweight = handed_over(weight) if call.into_main_grad else None
        else:
            dhidden, dweight = torch.ops.megappo.linear_backward(*problem, *upstream, logits, call.chunk_tokens)
        return call.sum_over_shards(dhidden), dweight, None, None, None, None, None
