"""Report of a step: its metrics by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megappo.algo.aggregation import tokens_per_sequence
from megappo.algo.kl import kl_estimate
from megappo.algo.summaries import expert_load, explained_variance, masked_moments, regression_moments, summarise
from megappo.data.packing import PackedBatch
from megappo.rewards.compose import Scored
from megappo.telemetry.metrics import Metric
from megappo.telemetry.timers import StageTimers
from megappo.trainer.sampler_check import Agreement
from megappo.trainer.updates import UpdateSummary


@dataclass(frozen=True)
class StepRecord:
    """Results of one PPO step, the same on every rank."""

    step: int
    batch: PackedBatch
    scored: Scored
    agreement: Agreement
    kl_estimator: str
    kl_coef: float
    critic: UpdateSummary
    policy: UpdateSummary
    pushed: dict[str, float]

    def kl_per_response(self) -> float:
        """Mean over responses of sum over tokens of log pi - log pi_ref, in nats; 0 without a reference.

        This is k1 under every estimator: the adaptive controller compares the KL of whole responses with its target, and k1 sums to
        log pi(y) / pi_ref(y), whose mean is that KL (`algo.kl.KLController`).
        """
        if "ref_logprob" not in self.batch:
            return 0.0
        return float(self._kl("k1").sum()) / max(1, self.batch.num_sequences)

    def metrics(self, timers: StageTimers) -> dict[str, float]:
        """Name -> value, grouped by the part before the slash. Costs that need the models or other ranks: `instruments.py`."""
        return {
            **self._reward(),
            **self._policy(),
            **self._critic(),
            **self._kl_metrics(),
            **self._lengths(),
            **self._rollout(),
            **self._costs(timers),
        }

    def _reward(self) -> dict[str, float]:
        score = torch.tensor(self.scored.total)
        return {
            Metric.SCORE_MEAN.value: _mean(score),
            Metric.SCORE_STD.value: float(score.std(correction=0)),
            Metric.SCORE_MIN.value: float(score.min()),
            Metric.SCORE_MAX.value: float(score.max()),
            **{Metric.SHAPED.of(key): value for key, value in _summary_of(self._per_sequence("reward")).items()},
            Metric.UNDECIDED.value: self.scored.num_undecided,
            Metric.UNUSABLE.value: self.scored.num_unusable,
            **self._reward_parts(),
            **self._routes(),
        }

    def _reward_parts(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, values in self.scored.parts.items():
            scored = torch.tensor([value for value in values if not math.isnan(value)])
            if not len(scored):
                continue  # no sample's recipe has the part
            summary = _summary_of(scored)
            found[Metric.REWARD_PART.of(name)] = summary.pop("mean")
            found |= {Metric.REWARD_PART.of(f"{name}/{key}"): value for key, value in summary.items()}
            if len(scored) < len(values):
                found[Metric.REWARD_PART.of(f"{name}/share")] = len(scored) / len(values)
        if self.scored.model_total is not None:
            models = torch.tensor(self.scored.model_total)
            rules = torch.tensor(self.scored.total) - models
            found |= {Metric.MODELS.of(key): value for key, value in _summary_of(models).items()}
            found |= {Metric.RULES.of(key): value for key, value in _summary_of(rules).items()}
        return found

    def _routes(self) -> dict[str, float]:
        """Mean score and number of the responses of each recipe; empty without a route."""
        scores: dict[str, list[float]] = {}
        for label, score in sorted(zip(self.scored.labels, self.scored.total)):
            scores.setdefault(label, []).append(score)
        means = {Metric.REWARD_ROUTE.of(f"{label}/mean"): _mean(torch.tensor(values)) for label, values in scores.items()}
        return means | {Metric.REWARD_ROUTE.of(f"{label}/count"): len(values) for label, values in scores.items()}

    def _policy(self) -> dict[str, float]:
        p, advantage = self.policy, self._summary("raw_advantage", "policy/advantage")
        metrics = {
            Metric.POLICY_ENTROPY.value: _masked_mean(self.batch["entropy"], self._mask),
            Metric.POLICY_UPDATES.value: p.num_updates,
            **advantage,
        }
        if p.sums:
            metrics |= {
                Metric.POLICY_LOSS.value: p.loss("surrogate_sum"),
                Metric.POLICY_CLIP_LOW.value: p.per_token("clip_low_sum"),
                Metric.POLICY_CLIP_HIGH.value: p.per_token("clip_high_sum"),
                Metric.POLICY_DUAL_CLIP.value: p.per_token("dual_clip_sum"),
                Metric.POLICY_APPROX_KL.value: p.per_token("approx_kl_sum"),
                Metric.POLICY_RATIO_MEAN.value: p.per_token("ratio_sum"),
                Metric.POLICY_RATIO_MAX.value: p.maxima["ratio_max"],
                Metric.POLICY_GRAD_NORM.value: p.grad_norm,
                Metric.POLICY_SKIPPED.value: p.skipped,
                Metric.POLICY_STOPPED.value: float(p.stopped_early),
            }
        if "kl_loss_sum" in p.sums:
            metrics[Metric.POLICY_KL_LOSS.value] = p.per_token("kl_loss_sum")
        if p.lr is not None:
            metrics[Metric.POLICY_LR.value] = p.lr
        return metrics | expert_metrics("policy", p.expert_tokens, p.balance_loss)

    def _critic(self) -> dict[str, float]:
        c = self.critic
        fit = regression_moments(self.batch["value"], self.batch["returns"], self._mask)
        metrics = {
            Metric.CRITIC_LOSS.value: c.loss("loss_sum"),
            Metric.CRITIC_EXPLAINED_VARIANCE.value: explained_variance(fit),
            Metric.CRITIC_VALUE_CLIP.value: c.per_token("value_clip_sum"),
            Metric.CRITIC_VALUE_ERROR_MAX.value: c.maxima.get("value_error_max", 0.0),
            Metric.CRITIC_GRAD_NORM.value: c.grad_norm,
            Metric.CRITIC_SKIPPED.value: c.skipped,
            Metric.CRITIC_UPDATES.value: c.num_updates,
            **self._summary("value", "critic/value"),
            **self._summary("returns", "critic/return"),
        }
        if c.lr is not None:
            metrics[Metric.CRITIC_LR.value] = c.lr
        return metrics | expert_metrics("critic", c.expert_tokens, c.balance_loss)

    def _kl_metrics(self) -> dict[str, float]:
        if "ref_logprob" not in self.batch:
            return {}
        return {
            Metric.KL_TOKEN.value: _masked_mean(self._kl(self.kl_estimator), self._mask),
            Metric.KL_TOKEN_K3.value: _masked_mean(self._kl("k3"), self._mask),
            Metric.KL_RESPONSE.value: self.kl_per_response(),
            Metric.KL_COEF.value: self.kl_coef,
        }

    def _lengths(self) -> dict[str, float]:
        response = _summary_of(self.response_lengths)
        prompts = (self.batch.lengths - self.response_lengths).float()
        return {
            Metric.RESPONSE_MEAN.value: response["mean"],
            Metric.RESPONSE_STD.value: response["std"],
            Metric.RESPONSE_MIN.value: response["min"],
            Metric.RESPONSE_MAX.value: response["max"],
            Metric.PROMPT_MEAN.value: _mean(prompts),
            Metric.PROMPT_MAX.value: float(prompts.max()),
            **{Metric.TOTAL_LENGTH.of(key): value for key, value in _summary_of(self.batch.lengths).items()},
            Metric.TRUNCATED.value: _mean(self.batch["truncated"].float()),
        }

    def _rollout(self) -> dict[str, float]:
        kept = self.agreement.kept
        return {
            Metric.PROB_DIFF_MEAN.value: self.agreement.mean,
            Metric.PROB_DIFF_MAX.value: self.agreement.max,
            **({} if kept is None else {Metric.KEPT_IDS.value: kept.ids, Metric.KEPT_OVERFLOW.value: kept.overflow}),
            **{f"rollout/push_{name}": value for name, value in self.pushed.items()},
        }

    def _costs(self, timers: StageTimers) -> dict[str, float]:
        generated = int(self._mask.sum())
        total = timers.total_s
        slow = {
            Metric.REWARD_SECONDS.of(f"{name}/{key}_s"): value
            for name, seconds in self.scored.seconds.items()
            for key, value in (("mean", seconds.mean), ("max", seconds.max))
        }
        return {
            **{Metric.STAGE_SECONDS.of(f"{name}_s"): seconds for name, seconds in timers.seconds.items()},
            **slow,
            Metric.STEP_SECONDS.value: total,
            Metric.TOKENS_PER_S.value: self.batch.num_tokens / total,
            Metric.GENERATED_PER_S.value: generated / max(timers.seconds["generate"], 1e-9),
            Metric.SAMPLES_PER_S.value: self.batch.num_sequences / total,
        }

    @property
    def response_lengths(self) -> Tensor:
        """[B] int64, sampled tokens of each response."""
        return tokens_per_sequence(self._mask, self.batch.cu_seqlens)

    @property
    def _mask(self) -> Tensor:
        return self.batch["response_mask"]

    def _kl(self, kl_estimator: str) -> Tensor:
        """Estimated KL to the reference, [T]: on sampled tokens, 0 elsewhere."""
        return torch.where(self._mask, kl_estimate(self.batch["logprob"], self.batch["ref_logprob"], kl_estimator), 0.0)

    def _per_sequence(self, name: str) -> Tensor:
        """Sum over the tokens of each sequence, [B]."""
        running = torch.cat([torch.zeros(1, dtype=torch.float64), self.batch[name].double().cumsum(0)])
        ends = self.batch.cu_seqlens.long()
        return running[ends[1:]] - running[ends[:-1]]

    def _summary(self, name: str, prefix: str) -> dict[str, float]:
        summary = summarise(*masked_moments(self.batch[name], self._mask))
        return {f"{prefix}_{key}": value for key, value in summary._asdict().items()}


_EXPERT_METRICS = {
    "policy": (Metric.POLICY_EXPERT_VIOLATION, Metric.POLICY_EXPERTS_IDLE, Metric.POLICY_BALANCE_LOSS),
    "critic": (Metric.CRITIC_EXPERT_VIOLATION, Metric.CRITIC_EXPERTS_IDLE, Metric.CRITIC_BALANCE_LOSS),
    "sft": (Metric.SFT_EXPERT_VIOLATION, Metric.SFT_EXPERTS_IDLE, Metric.SFT_BALANCE_LOSS),
}


def expert_metrics(role: Literal["policy", "critic", "sft"], tokens: Tensor | None, balance_loss: float) -> dict[str, float]:
    """Metrics of the experts; empty for a dense model. tokens: [layers, experts] sent to each expert, None for a dense model."""
    if tokens is None:
        return {}
    load = expert_load(tokens)
    violation, idle, balance = _EXPERT_METRICS[role]
    return {violation.value: load.max_violation, idle.value: load.idle, balance.value: balance_loss}


def _summary_of(x: Tensor) -> dict[str, float]:
    """mean, std, min and max of one number per response."""
    return summarise(*masked_moments(x, torch.ones_like(x, dtype=torch.bool)))._asdict()


def _mean(x: Tensor) -> float:
    return float(x.double().mean()) if x.numel() else 0.0


def _masked_mean(x: Tensor, mask: Tensor) -> float:
    return _mean(x[mask])
