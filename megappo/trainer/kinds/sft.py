"""Fine-tuning: the mean negative log-likelihood of the tokens to learn, or the divergence from a teacher there, over the whole
batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from megappo.algo.alignment import shift_left, shift_right
from megappo.algo.divergences import divergence
from megappo.config.supervised import SftConfig
from megappo.data.packing import PackedBatch
from megappo.engine.losses import LanguageOutput, LossOutput
from megappo.telemetry.metrics import Metric, figures
from megappo.trainer.build_roles import spec_of_role
from megappo.trainer.kinds.kind import Drawn, Kind, Share
from megappo.trainer.kinds.teacher import IDS, LOGPROBS, with_teacher


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
