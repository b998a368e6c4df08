"""Fine-tuning: the mean negative log-likelihood of the tokens to learn, or the divergence from a teacher there, over the whole
batch. The teacher's likeliest next tokens are computed where it lives and sent to the ranks of the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.algo.alignment import shift_left, shift_right
from megappo.algo.divergences import divergence
from megappo.config.supervised import SftConfig
from megappo.data.packing import PackedBatch
from megappo.engine.losses import LanguageOutput, LossOutput
from megappo.parallel.shares import Shares
from megappo.telemetry.metrics import Metric, figures
from megappo.trainer.build_roles import Roles, spec_of_role
from megappo.trainer.experience.route import Route, world_wire
from megappo.trainer.experience.table import Owners
from megappo.trainer.kinds.kind import Drawn, Kind, Share
from megappo.trainer.roles import Teacher

IDS, LOGPROBS = "teacher_id", "teacher_logprob"
"""Fields of a batch, [T, K] each: the teacher's likeliest ids for the token at t given its prefix, and their log-probs."""
_ROWS = 256  # rows of whole logits at a time: 155 MB for the largest vocabularies


class Sft(Kind[SftConfig]):
    """Fine-tuning on demonstrations."""

    reads = ("response_mask", IDS, LOGPROBS)

    def prepared(self, share: Share, drawn: Drawn) -> PackedBatch:
        settings = self.config.distillation
        if settings is None:
            return share.batch
        return with_teacher(share.batch, drawn, self.roles, settings.top_k, self._vocab_size)

    @cached_property
    def _vocab_size(self) -> int:
        return spec_of_role(self.config, self.config.learner, None).arch.vocab_size

    def count(self, batch: PackedBatch) -> float:
        return float(batch["response_mask"].sum())

    def loss(self, output: LanguageOutput, micro: PackedBatch) -> LossOutput:
        settings = self.config.distillation
        if settings is None:
            summed = self._nll(output, micro)
            return LossOutput(loss_sum=summed, sums={"loss_sum": summed})
        summed, sums = self._divergence(output, micro), dict[str, Tensor]()
        if settings.coef < 1.0:
            sums = {"divergence_sum": summed, "nll_sum": self._nll(output, micro)}
            summed = settings.coef * summed + (1.0 - settings.coef) * sums["nll_sum"]
        return LossOutput(loss_sum=summed, sums={"loss_sum": summed, **sums})

    def _nll(self, output: LanguageOutput, micro: PackedBatch) -> Tensor:
        logprob, _ = self.role.token_logprobs(output, micro, want_entropy=False)
        return -torch.where(micro["response_mask"], logprob, 0.0).sum()

    def _divergence(self, output: LanguageOutput, micro: PackedBatch) -> Tensor:
        settings, mask = self.config.distillation, micro["response_mask"]
        assert settings is not None
        policy = shift_right(output.logprobs_at(shift_left(micro[IDS], micro.cu_seqlens, 0)), micro.cu_seqlens)
        teacher = micro[LOGPROBS]
        # Tokens that are not learned have no teacher: any distribution will do, and the same one has no divergence.
        any_logprob = -math.log(2.0 * teacher.shape[1])
        teacher, policy = (torch.where(mask[:, None], values, any_logprob) for values in (teacher, policy))
        return torch.where(mask, divergence(teacher, policy, settings.divergence), 0.0).sum()

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        named = {Metric.SFT_LOSS: "loss_sum", Metric.SFT_NLL: "nll_sum", Metric.SFT_DIVERGENCE: "divergence_sum"}
        return figures({metric: sums[name] / count for metric, name in named.items() if name in sums})


def with_teacher(batch: PackedBatch, drawn: Drawn, roles: Roles, top_k: int, vocab_size: int) -> PackedBatch:
    """Add IDS and LOGPROBS to the policy's share of a pass, on its ranks that hold fields. vocab_size: of the policy, whose ids
    alone count. Collective over the world."""
    shares, world = roles.shares["teacher"], Shares.of_world(dist.get_world_size())
    teacher, names = roles.by_name.get("teacher"), [f"{field} {i}" for field in (IDS, LOGPROBS) for i in range(top_k)]
    fields = dict.fromkeys(names, torch.empty(0))
    if teacher is not None:
        assert isinstance(teacher, Teacher)
        report = partial(_report, top_k=top_k, vocab_size=vocab_size)
        with teacher.engine.eval_mode():
            share = drawn.share(shares).batch
            fields = teacher.engine.forward_backward(share, report, reads=("response_mask",), forward_only=True).tokens
    # By way of single ranks: only the reporters of a replica have its results, and all holders of the policy's read them.
    hops = [drawn.owners(one) for one in (shares, world, roles.shares["policy"])]
    for source, target in zip(hops, hops[1:]):
        fields = _sent(fields, drawn.sequence_lengths, source, target)
    if not fields:
        return batch
    ids, logprobs = (torch.stack([fields[name] for name in part], -1) for part in (names[:top_k], names[top_k:]))
    return batch.with_fields({IDS: ids.long(), LOGPROBS: logprobs})


def _sent(fields: dict[str, Tensor], lengths: Tensor, source: Owners, target: Owners) -> dict[str, Tensor]:
    return Route.between(lengths, source, target, dist.get_rank(), world_wire()).moved(None, fields)[1]


def _report(output: LanguageOutput, micro: PackedBatch, top_k: int, vocab_size: int) -> LossOutput:
    ids = torch.zeros(micro.num_tokens, top_k, device=micro.device)  # fp32, as results are, holds every id
    logprobs = torch.zeros_like(ids)
    # The output before a token that is learned gives its distribution.
    learned = shift_left(micro["response_mask"], micro.cu_seqlens, 0).nonzero().flatten()
    for rows in learned.split(_ROWS) if len(learned) else ():
        found = torch.log_softmax(output.logits(rows, "fp32")[:, :vocab_size], -1).topk(top_k)
        ids[rows], logprobs[rows] = found.indices.float(), found.values
    aligned = {field: shift_right(values, micro.cu_seqlens) for field, values in ((IDS, ids), (LOGPROBS, logprobs))}
    return LossOutput(tokens={f"{field} {i}": values[:, i] for field, values in aligned.items() for i in range(top_k)})
