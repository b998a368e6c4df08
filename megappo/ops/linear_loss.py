"""Loss of token log-probs from hidden states with three matrix products: logits, dhidden, dweight.

The loss of a chunk of tokens is differentiated while its logits exist: nothing is recomputed, no logits are kept. This saves the
fourth product of `linear_logprob`'s backward and costs a dweight between forward and backward. Where a token's loss needs log-probs
of other ranks' tokens (context parallel), use `linear_logprob`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megappo.ops.gemm import add_mm_, compute_dtype
from megappo.ops.linear_blocks import LinearLogits, cut
from megappo.ops.linear_logprob import LinearCall, LinearOptions, handed_over, linear_call, main_grad_of
from megappo.ops.vocab_shard import inverse_temperature, merge_shards
from megappo.ops.vocab_stats import Upstream

# Tokens. Fixed by the device, not by the shard: ranks with uneven shards must make the same collectives.
CHUNK_TOKENS = {"cpu": 512, "cuda": 4096}

TokenLoss = Callable[[slice, Tensor, Tensor | None], tuple[Tensor, dict[str, Tensor]]]
"""(tokens, logprob [t], entropy [t] or None) -> (scalar sum over these tokens, metrics). The same on every rank of the group."""


@dataclass(frozen=True)
class LinearLoss:
    """Loss of `linear_token_loss`: scalar, differentiable by hidden and weight. logprob, entropy: [T], without gradient."""

    loss: Tensor
    logprob: Tensor
    entropy: Tensor | None
    metrics: dict[str, Tensor]
    """Metrics of the token loss over all chunks: *_max by maximum, others by sum."""


def linear_token_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, group: dist.ProcessGroup | None, options: LinearOptions, token_loss: TokenLoss
) -> LinearLoss:
    """Sum token_loss over chunks of `linear_logprob`'s results, with its gradients. Arguments and ValueError as there.
    Logits of one chunk exist at a time: [4096, Vl] fp32 on a GPU, and beside them the gradient of up to 8192 tokens' in the
    weight's type, or dweight in fp32. Collective over the group: it gathers statistics once per
    chunk and reduces dhidden once, all in the forward."""
    assert options.mode == "fast" and not options.keep_logits, "options of linear_logprob"
    call = linear_call(hidden, weight, target, group, options)
    _, row_inv_temp = inverse_temperature(options.temperature, target)
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.no_grad():
        rows = call.all_rows(hidden)
        problem = call.problem(rows, weight, target.long(), row_inv_temp, options.kept)
        chunks = _Chunks(call, problem, token_loss, options.want_entropy, wanted)
        result = chunks.run()
    if not wanted:
        return result
    dhidden = call.sum_over_shards(chunks.dhidden)
    return LinearLoss(
        _WithGradients.apply(hidden, weight, result.loss, dhidden, chunks.dweight, options.into_main_grad),
        result.logprob,
        result.entropy,
        result.metrics,
    )


class _Chunks:
    """Pass over the chunks of tokens; `dhidden` is this shard's part."""

    def __init__(self, call: LinearCall, problem: LinearLogits, token_loss: TokenLoss, want_entropy: bool, gradients: bool) -> None:
        self.call, self.problem = call, problem
        self.token_loss, self.want_entropy, self.gradients = token_loss, want_entropy, gradients
        hidden, weight = problem.hidden, problem.weight
        # Without gradients the inputs stand in: nothing of a model's size is allocated for them.
        self.dhidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if gradients else hidden
        # None: the weight is frozen, and its gradient is no work.
        self.dweight = self.dlogits = None
        if gradients and weight.requires_grad:
            once = self.waits_for_all()
            # One product needs no sum in fp32, unless it is added to one.
            dtype = weight.dtype if once and not call.into_main_grad else compute_dtype(weight.dtype)
            self.dweight = weight.new_empty(weight.shape, dtype=dtype)
            self.dweight[problem.num_valid :] = 0  # no product reaches the rows of padding
            if once:
                self.dlogits = weight.new_empty(problem.num_tokens, problem.num_valid)

    @property
    def step(self) -> int:
        return self.call.chunk_tokens or CHUNK_TOKENS[self.problem.hidden.device.type]

    def waits_for_all(self) -> bool:
        """True if dweight is one product over all tokens, whose dlogits then wait for it: on a GPU, where they are no larger than
        the sum in fp32 that every chunk would read and write, and than those of two chunks."""
        hidden = self.problem.hidden
        sum_as_tokens = hidden.shape[1] * compute_dtype(hidden.dtype).itemsize // hidden.dtype.itemsize
        return hidden.is_cuda and hidden.shape[0] <= min(sum_as_tokens, 2 * self.step)

    def run(self) -> LinearLoss:
        problem = self.problem
        # Without tokens one empty chunk still runs: the loss names its metrics, and every rank makes the same collectives.
        results = [self.chunk(tokens) for tokens in cut(problem.num_tokens, self.step) or [slice(0, 0)]]
        if self.dlogits is not None and self.dweight is not None:
            add_mm_(self.dweight[: problem.num_valid], self.dlogits.t(), problem.hidden, first=True)
        losses, logprobs, entropies, metrics = zip(*results)
        return LinearLoss(
            torch.stack(losses).sum(),
            torch.cat(logprobs),
            torch.cat(entropies) if self.want_entropy else None,
            {name: _combined(name, [m[name] for m in metrics]) for name in metrics[0]},
        )

    def chunk(self, tokens: slice) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Tensor]]:
        problem, shard = self.problem.at(tokens), self.call.shard
        # Logits are kept, of one block of tokens, so that the weights of a block of columns are widened once.
        stats, logits = torch.ops.megappo.linear_stats(*problem, self.want_entropy, True, problem.num_tokens)
        logprob, entropy, lse = merge_shards(stats, problem.target, shard)
        loss, g_logprob, g_entropy, metrics = self.differentiate(tokens, logprob, entropy if self.want_entropy else None)
        if self.gradients:
            whole, upstream = (slice(None), slice(0, problem.num_valid)), Upstream(lse, entropy, g_logprob, g_entropy)
            out = None if self.dlogits is None else self.dlogits[tokens]
            dlogits = problem.dlogits(logits, *whole, upstream, own=True, out=out)
            self.dhidden[tokens] = dlogits @ problem.weight[: problem.num_valid]
            # a dweight that autograd rounds to the weight's type may round each term to it; main_grad stays fp32
            exact, dweight = self.call.into_main_grad, self.dweight
            if dweight is not None and out is None:
                for block in problem.blocks(dlogits.shape[0])[1]:
                    add_mm_(dweight[block], dlogits[:, block].t(), problem.hidden, first=tokens.start == 0, exact=exact)
        return loss, logprob, entropy if self.want_entropy else None, metrics

    def differentiate(
        self, tokens: slice, logprob: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Tensor]]:
        """Compute (loss, its gradients by logprob and entropy, metrics) of a chunk."""
        # The caller runs without gradients; only the loss is differentiated, from leaves of [t] numbers.
        with torch.enable_grad():
            leaf = logprob.detach().requires_grad_()
            entropy_leaf = None if entropy is None else entropy.detach().requires_grad_()
            loss, metrics = self.token_loss(tokens, leaf, entropy_leaf)
            if not self.gradients:
                return loss.detach(), leaf, None, metrics
            inputs = [leaf] if entropy_leaf is None else [leaf, entropy_leaf]
            # materialize_grads: a loss that ignores the entropy has gradient 0 there, not None.
            gradients = torch.autograd.grad(loss, inputs, materialize_grads=True)
        return loss.detach(), gradients[0], gradients[1] if len(gradients) == 2 else None, metrics


def _combined(name: str, values: list[Tensor]) -> Tensor:
    stacked = torch.stack([value.detach() for value in values])
    return stacked.amax(0) if name.endswith("_max") else stacked.sum(0)


class _WithGradients(torch.autograd.Function):
    """Scalar `loss` whose backward multiplies the precomputed gradients by the upstream scalar."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, loss: Tensor, dhidden: Tensor, dweight: Tensor | None, into_main_grad: bool
    ) -> Tensor:
        ctx.save_for_backward(weight, dhidden, dweight)
        ctx.into_main_grad = into_main_grad
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        weight, dhidden, dweight = ctx.saved_tensors
        if ctx.into_main_grad:
            main_grad_of(weight).addcmul_(dweight, g)  # g stays on the device: its value is never read on the host
            weight_grad = handed_over(weight)
        else:
            # In one pass; [1, 1] because a factor without dimensions would be rounded to the weight's type first.
            weight_grad = None if dweight is None else torch.mul(dweight, g.view(1, 1), out=torch.empty_like(weight))
        return dhidden * g, weight_grad, None, None, None, None
