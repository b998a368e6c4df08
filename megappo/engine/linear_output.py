"""The `LanguageOutput` of engines with final hidden states and rows of the output projection, by the linear ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megappo.engine.losses import FusedLoss, LogitsDtype, LogprobQuery
from megappo.ops.linear_ids import linear_logprobs_at
from megappo.ops.linear_logprob import LinearOptions, has_main_grad, linear_logprob
from megappo.ops.linear_loss import TokenLoss, linear_token_loss
from megappo.parallel.context import ContextShard


@dataclass(frozen=True)
class LinearOutput:
    """Final hidden states of one micro-batch of T tokens, and the output projection."""

    hidden: Tensor  # [T / cp, H]; [T / cp / tp, H] with sequence_parallel
    weight: Tensor  # [V / tp, H], this rank's rows
    vocab_start: int  # global id of the first row
    num_valid: int  # rows that are real vocabulary; the rest is padding
    group: dist.ProcessGroup | None = None  # of tp; None: this rank alone
    sequence_parallel: bool = False
    context: ContextShard | None = None  # this rank's part of the T tokens; None: all
    widest: int | None = None  # rows of the largest shard; None: all are as large as this one
    logit_scale: float = 1.0  # factor of the products
    first_feature: int | None = None  # ids from here on are features of images, whose log-prob is 0; None: there are none

    @property
    def fused_loss(self) -> FusedLoss | None:
        """None under context parallel: the loss needs log-probs of tokens that other ranks of that group hold."""
        return self._fused_loss if self.context is None else None

    def logprobs(self, query: LogprobQuery) -> tuple[Tensor, Tensor | None]:
        logprob, entropy = linear_logprob(*self._arguments(query))
        return self.all_tokens(logprob), None if entropy is None else self.all_tokens(entropy)

    def logprobs_at(self, ids: Tensor) -> Tensor:
        query = LogprobQuery(ids[:, 0], temperature=1.0, want_entropy=False)
        hidden, weight, _, group, options = self._arguments(query)
        return self.all_tokens(linear_logprobs_at(hidden, weight, self.own_tokens(ids), group, options))

    def logits(self, rows: Tensor, logits_dtype: LogitsDtype) -> Tensor:
        """See `LanguageOutput`; V is the padded vocabulary. Collective over both groups."""
        hidden = self._gathered(self.hidden) if self.sequence_parallel else self.hidden
        local = _product(self.all_tokens(hidden)[rows], self.weight)
        local = self.logit_scale * (local.bfloat16().float() if logits_dtype == "bf16" else local)
        local[:, self.num_valid :] = -torch.inf  # vocabulary padding
        if self.widest is not None:  # a gather takes equal shards
            local = pad(local, (0, self.widest - local.shape[1]), value=-torch.inf)
        return self._gathered(local.t().contiguous()).t()

    def _fused_loss(self, query: LogprobQuery, token_loss: TokenLoss) -> tuple[Tensor, dict[str, Tensor]]:
        result = linear_token_loss(*self._arguments(query), token_loss)
        return result.loss, result.metrics

    def _arguments(self, query: LogprobQuery) -> tuple[Tensor, Tensor, Tensor, dist.ProcessGroup | None, LinearOptions]:
        temperature = query.temperature
        options = LinearOptions(
            vocab_start=self.vocab_start,
            num_valid=self.num_valid,
            sequence_parallel=self.sequence_parallel,
            # A factor of the logits is the inverse of a temperature.
            temperature=(self.own_tokens(temperature) if isinstance(temperature, Tensor) else temperature) / self.logit_scale,
            want_entropy=query.want_entropy,
            logits_dtype=query.logits_dtype,
            kept=None if query.kept is None else self.own_tokens(query.kept),
            into_main_grad=has_main_grad(self.weight),
        )
        target = query.target
        if self.first_feature is not None:
            target = target.masked_fill(target >= self.first_feature, options.ignore_index)
        return self.hidden, self.weight, self.own_tokens(target), self.group, options

    def own_tokens(self, x: Tensor) -> Tensor:
        """Take this context-parallel rank's tokens: [T, ...] -> [T / cp, ...]."""
        return x if self.context is None else self.context.take(x)

    def all_tokens(self, x: Tensor) -> Tensor:
        """Gather all tokens: [T / cp, ...] -> [T, ...] on every rank; differentiable. Collective over that group."""
        return x if self.context is None else self.context.gather(x)

    def _gathered(self, local: Tensor) -> Tensor:
        world = 1 if self.group is None else dist.get_world_size(self.group)
        if world == 1:
            return local
        full = local.new_empty(world * local.shape[0], *local.shape[1:])
        dist.all_gather_into_tensor(full, local.contiguous(), group=self.group)
        return full


def _product(hidden: Tensor, weight: Tensor) -> Tensor:
    # [R, V / tp] in fp32: a product of bf16 tensors would be rounded.
    if hidden.dtype == torch.float32:
        return hidden @ weight.t()
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32) if hidden.is_cuda else hidden.float() @ weight.float().t()
