"""Preference optimisation of a policy without a reward model, by the log-probs of whole responses: DPO, IPO, KTO, SimPO, ORPO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from megappo.algo import preferences
from megappo.algo.aggregation import tokens_per_sequence
from megappo.config.supervised import DpoConfig, IpoLossConfig, KtoLossConfig, OrpoLossConfig, SimpoLossConfig
from megappo.data.examples import Examples
from megappo.data.packing import PackedBatch
from megappo.data.preferences import num_preferences
from megappo.engine.losses import LanguageOutput, LossOutput
from megappo.telemetry.metrics import Metric, figures
from megappo.trainer.kinds.kind import Drawn, Kind, Share
from megappo.trainer.kinds.reference import KeptReference, logprobs_of, mismatched_logprobs


class Dpo(Kind[DpoConfig]):
    """Preference optimisation. Its reference is the policy as it starts, unless `reference.model` names another one."""

    reads = ("response_mask", "label", "ref_logprob", "nll_scale", "kl")
    columns = ("loss", "accuracy", "margin", "grad_norm", "lr")
    _kept: KeptReference | None = None

    def begin(self, sets: Iterable[Examples], note: Callable[[str], None]) -> None:
        """Compute the reference's log-probs of these examples, unless they are kept, while the policy has its first weights."""
        config = self.config
        if config.reads_reference and not config.reference.every_step:
            self._kept = KeptReference.of_run(config, self.roles, sets, note)

    def prepared(self, share: Share, drawn: Drawn) -> PackedBatch:
        loss, batch, count = self.config.loss, share.batch, len(drawn.numbers)
        tokens = tokens_per_sequence(batch["response_mask"], batch.cu_seqlens)
        fields = {"ref_logprob": torch.zeros(batch.num_sequences, dtype=torch.float64)}
        if self.config.reads_reference:
            if self._kept is not None:
                reference = self._kept.of(drawn)
            else:
                reference = logprobs_of(self.roles.reference, drawn, self.roles.shares["reference"])
            own = reference[share.places]
            fields["ref_logprob"] = own[:, 0] if isinstance(loss, KtoLossConfig) else own.flatten()
            if isinstance(loss, KtoLossConfig):
                policy = share.everywhere(mismatched_logprobs(self.role, drawn, share), count)
                kl = float((policy - reference[:, 1]).mean().clamp(min=0.0))
                fields["kl"] = torch.full((batch.num_sequences,), kl, dtype=torch.float64)
            elif loss.logprob == "mean":
                fields["ref_logprob"] = fields["ref_logprob"] / tokens.clamp(min=1)
        if loss.nll_coef:
            chosen = torch.arange(batch.num_sequences) % 2 == 0
            all_tokens = share.total(float(tokens[chosen].sum()))
            # The loss is divided by the pairs, their negative log-likelihood by the tokens of the chosen responses.
            fields["nll_scale"] = chosen * (loss.nll_coef * count / max(all_tokens, 1.0))
        return batch.with_fields(sequence_fields=fields)

    def count(self, batch: PackedBatch) -> float:
        return float(num_preferences(batch))

    def loss(self, output: LanguageOutput, micro: PackedBatch) -> LossOutput:
        settings, mask = self.config.loss, micro["response_mask"]
        tokens, _ = self.role.token_logprobs(output, micro, want_entropy=False)
        logprob = preferences.sequence_logprobs(tokens, mask, micro.cu_seqlens, mean=settings.logprob == "mean")
        ratio = logprob - micro["ref_logprob"]
        summed, sums = self._labelled(ratio, micro) if isinstance(settings, KtoLossConfig) else self._paired(ratio)
        sums["loss_sum"] = summed
        if "nll_scale" in micro:
            nll = -(torch.where(mask, tokens, 0.0) * micro.of_tokens(micro["nll_scale"])).sum()
            summed, sums["nll_sum"] = summed + nll, nll
        return LossOutput(loss_sum=summed.to(tokens.dtype), sums=sums)

    def _paired(self, ratio: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        settings, (chosen, rejected) = self.config.loss, preferences.pairs_of(ratio)
        if isinstance(settings, OrpoLossConfig):
            losses = settings.beta * preferences.odds_ratio_loss(chosen, rejected)
        elif isinstance(settings, IpoLossConfig):
            losses = preferences.ipo_loss(chosen - rejected, settings.beta)
        else:
            assert not isinstance(settings, KtoLossConfig), "not of pairs"
            target = settings.gamma if isinstance(settings, SimpoLossConfig) else 0.0
            losses = preferences.sigmoid_loss(chosen - rejected, settings.beta, settings.label_smoothing, target)
        return losses.sum(), preferences.response_sums(settings.beta * chosen, settings.beta * rejected)

    def _labelled(self, ratio: Tensor, micro: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        settings, label, kl = self.config.loss, micro["label"], micro["kl"]
        assert isinstance(settings, KtoLossConfig)
        weight = torch.where(label > 0, settings.desirable_weight, settings.undesirable_weight)
        losses = weight * preferences.kto_loss(ratio, label, kl, settings.beta)
        reward, good, bad = settings.beta * ratio.detach(), (label > 0).double(), (label < 0).double()
        return losses.sum(), {
            "chosen_sum": (good * reward).sum(),
            "rejected_sum": (bad * reward).sum(),
            "chosen_count_sum": good.sum(),
            "rejected_count_sum": bad.sum(),
            "accuracy_sum": torch.where(label == 0, 0.0, preferences.in_order(label * (ratio.detach() - kl))).sum(),
            "kl_sum": kl.sum(),
        }

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        chosen = sums["chosen_sum"] / max(sums.get("chosen_count_sum", count), 1.0)
        rejected = sums["rejected_sum"] / max(sums.get("rejected_count_sum", count), 1.0)
        named: dict[str, float] = {
            Metric.DPO_LOSS: (sums["loss_sum"] + sums.get("nll_sum", 0.0)) / count,
            Metric.DPO_ACCURACY: sums["accuracy_sum"] / count,
            Metric.DPO_MARGIN: chosen - rejected,
            Metric.DPO_CHOSEN: chosen,
            Metric.DPO_REJECTED: rejected,
        }
        if "kl_sum" in sums:
            named[Metric.DPO_KL] = sums["kl_sum"] / count
        if "nll_sum" in sums:
            named[Metric.DPO_NLL] = sums["nll_sum"] / count / self.config.loss.nll_coef
        return figures(named)
