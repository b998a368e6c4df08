"""The models of PPO with the methods that the loop calls: log-probs, values, scores, updates. Independent of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megappo.algo.alignment import align_values, next_token_targets, shift_left, shift_right
from megappo.algo.kl import kl_loss
from megappo.algo.losses import entropy_loss, nll_loss
from megappo.algo.objectives import cispo_loss, dis_loss, sequence_log_ratio, token_kl_sum
from megappo.algo.summaries import ratio_counts
from megappo.algo.value_losses import ValueBins, categorical_loss, huber_loss
from megappo.config.role_sections import CategoricalLossConfig, HuberLossConfig, MSELossConfig, ValueLossConfig
from megappo.config.schema import AlgorithmConfig
from megappo.data.packing import NO_ID, ROUTES, PackedBatch
from megappo.engine.base import Engine, PassResult, StepResult
from megappo.engine.losses import LanguageOutput, LogitsDtype, LogprobQuery, LossOutput
from megappo.ops.losses import policy_loss, value_loss
from megappo.trainer.critics import BONUS, fields_of

SEQUENCE_RATIO = "sequence_log_ratio"
"""Field of GSPO's loss: the log-ratio of the token's sequence."""


def separates(algorithm: AlgorithmConfig) -> bool:
    """Return True if the loss of a token depends on no other token, so it can be computed chunk by chunk of logits."""
    return algorithm.loss.type != "gspo"


def fields_of_sequences(
    algorithm: AlgorithmConfig, micro: PackedBatch, fields: Mapping[str, Tensor], logprob: Tensor
) -> dict[str, Tensor]:
    """Return the extra fields that GSPO's `surrogate` reads. micro: whole sequences. fields, logprob: of all its tokens, [T]."""
    old = fields[algorithm.old_logprob]
    return {SEQUENCE_RATIO: sequence_log_ratio(logprob, old, fields["weight"], micro.cu_seqlens)}


def surrogate(algorithm: AlgorithmConfig, fields: Mapping[str, Tensor], logprob: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (sum of weight * loss, metrics `algo.losses.POLICY_SUMS`) of some tokens, differentiable with respect to `logprob`.
    fields: `algorithm.old_logprob`, advantage and weight of the same tokens; for GSPO also those of `fields_of_sequences`."""
    a, advantage, weight = algorithm.loss, fields["advantage"], fields["weight"]
    old = fields[algorithm.old_logprob]
    if a.type == "dis":
        return dis_loss(logprob, old, advantage, weight, a.low, a.high)
    if a.type == "cispo":
        return cispo_loss(logprob, old, advantage, weight, a.clip_low, a.clip_high)
    clip = {"clip_low": a.clip_low, "clip_high": a.clip_high, "dual_clip": a.dual_clip}
    if a.type == "ppo":
        return policy_loss(logprob, old, advantage, weight, **clip)
    # The sequence's ratio with the gradient of the token's own (arXiv:2507.18071, eq. 14). The old log-prob is zeros, so that all
    # tokens of a sequence have the same bits: GSPO's clip ranges are of 1e-4.
    of_sequence = fields[SEQUENCE_RATIO] + (logprob - logprob.detach())
    loss, metrics = policy_loss(of_sequence, old.new_zeros(old.shape), advantage, weight, **clip)
    return loss, {**metrics, "approx_kl_sum": token_kl_sum(logprob, old, weight)}


def bins_of(loss: ValueLossConfig) -> ValueBins | None:
    """Return the bins of a categorical head; None for a head that outputs the value itself."""
    return ValueBins(loss.type, loss.bins, loss.low, loss.high) if isinstance(loss, CategoricalLossConfig) else None


def value_surrogate(how: ValueLossConfig, output: Tensor, fields: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (sum of weight * loss, metrics). output: of the head, aligned with the tokens, [T] or [T, bins]. fields: value (old),
    returns and weight, [T]."""
    old, returns, weight = fields["value"], fields["returns"], fields["weight"]
    if isinstance(how, MSELossConfig):
        return value_loss(output, old, returns, weight, clip=how.clip)
    if isinstance(how, HuberLossConfig):
        return huber_loss(output, old, returns, weight, how.clip, how.delta)
    bins = ValueBins(how.type, how.bins, how.low, how.high)
    return categorical_loss(output, returns, weight, bins)


@dataclass(frozen=True)
class UpdateResult:
    """Result of one mini-batch update. lr and step are None if no optimizer step was taken (target KL reached)."""

    losses: PassResult
    step: StepResult | None
    lr: float | None


class LanguageModel:
    """A model that gives log-probs of tokens: the reference, and the base of the policy.
    Log-probs are those of the sampler's distribution: its temperature and logits_dtype (`config.role_sections.PolicyConfig`),
    restricted to the ids of the field `kept` if a batch has it."""

    sampling_fields = ("kept", ROUTES)
    """Fields that a pass of log-probs reads if a batch has them."""

    def __init__(
        self, engine: Engine, temperature: float, logits_dtype: LogitsDtype = "fp32", *, replays_experts: bool = True
    ) -> None:
        self.engine = engine
        if not replays_experts:
            self.sampling_fields = tuple(name for name in LanguageModel.sampling_fields if name != ROUTES)
        self.temperature = temperature
        self.logits_dtype: LogitsDtype = logits_dtype

    def outputs(self, share: PackedBatch) -> dict[str, Tensor]:
        """Return ref_logprob [T] of this replica's tokens, on the rank that reports."""
        return {"ref_logprob": self.logprobs(share, want_entropy=False)[0]}

    def logprobs(self, share: PackedBatch, *, want_entropy: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return (logprob [T], entropy [T] or None) of every token of this replica's share given its prefix; 0 at sequence starts.
        Under the sampling temperature. On the rank that reports them; zeros on others (`engine.base.PassResult`)."""
        with self.engine.eval_mode():
            report = partial(self._report, want_entropy=want_entropy)
            result = self.engine.forward_backward(share, report, reads=self.sampling_fields, forward_only=True)
        return result.tokens["logprob"], result.tokens.get("entropy")

    def _report(self, output: LanguageOutput, micro: PackedBatch, want_entropy: bool) -> LossOutput:
        logprob, entropy = self.token_logprobs(output, micro, want_entropy)
        return LossOutput(tokens={"logprob": logprob} if entropy is None else {"logprob": logprob, "entropy": entropy})

    def token_logprobs(self, output: LanguageOutput, micro: PackedBatch, want_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Return (logprob [T], entropy [T] or None) aligned with their own tokens, differentiable."""
        logprob, entropy = output.logprobs(self._query(micro, want_entropy))
        aligned = shift_right(logprob, micro.cu_seqlens)
        return aligned, None if entropy is None else shift_right(entropy, micro.cu_seqlens)

    def _query(self, micro: PackedBatch, want_entropy: bool) -> LogprobQuery:
        """Build the query for every token: row t - 1 gives the log-prob of token t."""
        return LogprobQuery(
            target=next_token_targets(micro.tokens, micro.cu_seqlens),
            temperature=self.temperature,
            logits_dtype=self.logits_dtype,
            kept=shift_left(micro.ragged("kept").padded(), micro.cu_seqlens, NO_ID) if "kept" in micro else None,
            want_entropy=want_entropy,
        )


class Teacher(LanguageModel):
    """The frozen model that the policy is distilled from (`algorithm.distillation`). It has experts of its own to choose."""

    sampling_fields = ("kept",)

    def outputs(self, share: PackedBatch) -> dict[str, Tensor]:
        """Return teacher_logprob [T] of this replica's tokens, on the rank that reports."""
        return {"teacher_logprob": self.logprobs(share, want_entropy=False)[0]}


class BaseOfPolicy(LanguageModel):
    """The reference of a policy with adapters: the policy's model with its adapters off."""

    def logprobs(self, share: PackedBatch, *, want_entropy: bool = True) -> tuple[Tensor, Tensor | None]:
        adapters = self.engine.adapters
        assert adapters is not None, f"{self.engine.name} has no adapters"
        with adapters.off():
            return super().logprobs(share, want_entropy=want_entropy)


NLL_WEIGHT = "nll_weight"
"""Field of a mini-batch: weight of each token's negative log-likelihood, 0 outside correct responses."""


PTX_WEIGHT = "ptx_weight"
"""Field of a mini-batch: weight of each token's language-modelling loss, 0 outside the texts of `algorithm.ptx`."""


def loss_kl_coef(algorithm: AlgorithmConfig) -> float:
    """Return the coefficient of the KL term in the policy's loss; 0 if the KL is in the reward or nowhere."""
    return algorithm.kl.coef if algorithm.kl.placement == "loss" else 0.0


def policy_reads(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """Return the names of the batch fields that the policy's loss reads."""
    reads = [algorithm.old_logprob, "advantage", "weight"]
    if loss_kl_coef(algorithm) > 0:
        reads.append("ref_logprob")
    if algorithm.positive_nll is not None:
        reads.append(NLL_WEIGHT)
    if algorithm.ptx is not None:
        reads.append(PTX_WEIGHT)
    if algorithm.disagreement_entropy_ratio is not None:
        reads.append(BONUS)
    return tuple(reads)


class Policy(LanguageModel):
    """The trained policy. counts_ratios: updates also count the probability ratios in bins (`algo.summaries.ratio_counts`).
    entropy_coef: coefficient of the entropy bonus in the next updates."""

    loss_name = "surrogate_sum"
    """Name of the main loss among the sums of an update."""

    def __init__(self, engine: Engine, temperature: float, algorithm: AlgorithmConfig, logits_dtype: LogitsDtype = "fp32") -> None:
        super().__init__(engine, temperature, logits_dtype)
        self._algorithm = algorithm
        self._kl_coef = loss_kl_coef(algorithm)
        self._reads = policy_reads(algorithm)
        self.counts_ratios = False
        self.entropy_coef = algorithm.entropy.coef

    def outputs(self, share: PackedBatch) -> dict[str, Tensor]:
        """Return logprob and entropy [T], on the rank that reports."""
        logprob, entropy = self.logprobs(share)
        assert entropy is not None
        return {"logprob": logprob, "entropy": entropy}

    def update(self, mini: PackedBatch, denominator: float) -> UpdateResult:
        """Take one optimizer step on a mini-batch. mini: this replica's share, with the fields of `policy_reads`."""
        self.engine.optimizer_zero_grad()
        reads = (*self.sampling_fields, *self._reads)
        losses = self.engine.forward_backward(mini, self._loss_of, reads=reads, denominator=denominator)
        target_kl, sums = self._algorithm.target_kl, losses.sums
        if target_kl is not None and sums["approx_kl_sum"] / max(1.0, sums["tokens_sum"]) > 1.5 * target_kl:
            return UpdateResult(losses, step=None, lr=None)
        lr = self.engine.lr_scheduler_step()
        return UpdateResult(losses, self.engine.optimizer_step(), lr)

    def _loss_of(self, output: LanguageOutput, micro: PackedBatch) -> LossOutput:
        # Without an entropy bonus, skip the pass over the logits that computes the entropy.
        want_entropy = self.entropy_coef > 0
        if output.fused_loss is None or not separates(self._algorithm):
            logprob, entropy = self.token_logprobs(output, micro, want_entropy)
            own = {name: micro[name] for name in self._reads}
            if not separates(self._algorithm):
                own |= fields_of_sequences(self._algorithm, micro, own, logprob)
            return _loss_output(*self._token_loss(own, logprob, entropy))

        fields = {name: shift_left(micro[name], micro.cu_seqlens, 0) for name in self._reads}

        def token_loss(tokens: slice, logprob: Tensor, entropy: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
            return self._token_loss({name: field[tokens] for name, field in fields.items()}, logprob, entropy)

        return _loss_output(*output.fused_loss(self._query(micro, want_entropy), token_loss))

    def _query(self, micro: PackedBatch, want_entropy: bool) -> LogprobQuery:
        query = super()._query(micro, want_entropy)
        if PTX_WEIGHT not in micro or self.temperature == 1.0:
            return query
        # Texts were not sampled: their distribution is the model's own.
        is_text = shift_left(micro[PTX_WEIGHT], micro.cu_seqlens, 0) != 0
        return replace(query, temperature=torch.where(is_text, 1.0, self.temperature))

    def _token_loss(
        self, fields: Mapping[str, Tensor], logprob: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        a, weight = self._algorithm, fields["weight"]
        loss, metrics = surrogate(a, fields, logprob)
        metrics["surrogate_sum"] = loss
        if self.counts_ratios:
            metrics |= ratio_counts(logprob, fields[a.old_logprob], weight)
        if entropy is not None:
            bonus = weight * fields[BONUS] if BONUS in fields else weight
            loss = loss + self.entropy_coef * entropy_loss(entropy, bonus)
        if self._kl_coef > 0:
            penalty, kl_metrics = kl_loss(logprob, fields["ref_logprob"], weight, a.kl.estimator)
            loss = loss + self._kl_coef * penalty
            metrics = {**metrics, **kl_metrics}
        if a.positive_nll is not None:
            nll, nll_metrics = nll_loss(logprob, fields[NLL_WEIGHT])
            loss = loss + a.positive_nll.coef * nll
            metrics = {**metrics, **nll_metrics}
        if a.ptx is not None:
            nll, ptx_metrics = nll_loss(logprob, fields[PTX_WEIGHT])
            loss = loss + a.ptx.coef * nll
            metrics |= {"ptx_sum": ptx_metrics["nll_sum"], "ptx_tokens_sum": ptx_metrics["nll_tokens_sum"]}
        return loss, metrics


def critic_reads(role: str) -> tuple[str, ...]:
    """Return the names of the batch fields that a critic's loss reads: its own value and returns, and the weight."""
    fields = fields_of(role)
    return fields.value, fields.returns, "weight"


_SQUARED_ERROR = MSELossConfig()


class Critic:
    """A model of state values V(s_t). loss: with the bins of a categorical head. role: names its fields (`critics.fields_of`)."""

    loss_name = "loss_sum"
    """Name of the main loss among the sums of an update."""

    def __init__(self, engine: Engine, loss: ValueLossConfig = _SQUARED_ERROR, role: str = "critic") -> None:
        self.engine = engine
        self._how, self._bins = loss, bins_of(loss)
        self._fields, self._reads = fields_of(role), critic_reads(role)

    def outputs(self, share: PackedBatch) -> dict[str, Tensor]:
        """Return the critic's own fields value [T] and bootstrap [B], see `values`."""
        value, bootstrap = self.values(share)
        return {self._fields.value: value, self._fields.bootstrap: bootstrap}

    def values(self, share: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return (value [T], value after the last token [B]) of this replica's share, on the rank that reports.
        value[t] = V(x_<t), 0 at the first token of a sequence."""
        with self.engine.eval_mode():
            result = self.engine.forward_backward(share, self._report, forward_only=True)
        raw = result.tokens["raw_value"]
        return align_values(raw, share.cu_seqlens)

    def update(self, mini: PackedBatch, denominator: float) -> UpdateResult:
        """Take one optimizer step on a mini-batch. mini: this replica's share, with the fields of `critic_reads`."""
        self.engine.optimizer_zero_grad()
        losses = self.engine.forward_backward(mini, self._loss_of, reads=self._reads, denominator=denominator)
        lr = self.engine.lr_scheduler_step()
        return UpdateResult(losses, self.engine.optimizer_step(), lr)

    def _report(self, output: Tensor, micro: PackedBatch) -> LossOutput:
        return LossOutput(tokens={"raw_value": output if self._bins is None else self._bins.expectation(output)})

    def _loss_of(self, output: Tensor, micro: PackedBatch) -> LossOutput:
        aligned, _ = align_values(output, micro.cu_seqlens)
        own = {"value": micro[self._fields.value], "returns": micro[self._fields.returns], "weight": micro["weight"]}
        loss, metrics = value_surrogate(self._how, aligned, own)
        return _loss_output(loss, {**metrics, "loss_sum": loss})


class RewardModel:
    """The frozen model that scores whole sequences."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def scores(self, share: PackedBatch) -> Tensor:
        """Return the head's output at the last token of each sequence of this replica's share, [B] fp32, on the rank that
        reports."""
        with self.engine.eval_mode():
            result = self.engine.forward_backward(share, self._report, forward_only=True)
        return result.tokens["raw_score"][share.cu_seqlens[1:].long() - 1]

    def _report(self, output: Tensor, micro: PackedBatch) -> LossOutput:
        return LossOutput(tokens={"raw_score": output})


def _loss_output(loss: Tensor, metrics: dict[str, Tensor]) -> LossOutput:
    return LossOutput(
        loss_sum=loss,
        sums={name: value for name, value in metrics.items() if name.endswith("_sum")},
        maxima={name: value for name, value in metrics.items() if name.endswith("_max")},
    )
