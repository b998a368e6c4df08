"""What a step reports: its metrics by name, and samples of its trajectories."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Any, Optional, Sequence

import torch
from torch import Tensor

from megappo.algo.aggregation import tokens_per_sequence
from megappo.algo.explained import explained_variance, masked_moments, regression_moments, summarise
from megappo.data.packing import PackedBatch
from megappo.data.prompts import Prompt
from megappo.telemetry.timers import StageTimers
from megappo.trainer.agreement import Agreement
from megappo.trainer.evaluation import Evaluation
from megappo.trainer.scoring import Scored
from megappo.trainer.updates import UpdateSummary


@dataclass(frozen=True)
class StepRecord:
    """Everything a PPO step produced. Every rank holds the same record."""

    step: int
    batch: PackedBatch
    scored: Scored
    agreement: Agreement
    kl_coef: float
    critic: UpdateSummary
    policy: UpdateSummary
    pushed: dict[str, float]

    def kl_per_response(self) -> float:
        """Mean over responses of sum over tokens of log pi - log pi_ref, in nats; 0 without a reference."""
        if "ref_logprob" not in self.batch:
            return 0.0
        return float(self._kl().sum()) / max(1, self.batch.num_sequences)

    def metrics(self, timers: StageTimers, evaluation: Optional[Evaluation]) -> dict[str, float]:
        """Name -> value, grouped by the part before the slash."""
        return {
            **self._reward(),
            **self._evaluation(evaluation),
            **self._policy(),
            **self._critic(),
            **self._kl_metrics(),
            **self._lengths(),
            **self._rollout(),
            **self._costs(timers),
        }

    def _reward(self) -> dict[str, float]:
        score = torch.tensor(self.scored.total)
        parts = {f"reward/{name}": _mean(torch.tensor(values)) for name, values in self.scored.parts.items()}
        shaped = self._per_sequence("reward")
        return {
            "reward/score_mean": _mean(score),
            "reward/score_std": float(score.std(correction=0)),
            "reward/score_min": float(score.min()),
            "reward/score_max": float(score.max()),
            "reward/shaped_mean": _mean(shaped),
            **parts,
        }

    @staticmethod
    def _evaluation(evaluation: Optional[Evaluation]) -> dict[str, float]:
        if evaluation is None:
            return {}
        parts = {f"eval/{name}": value for name, value in evaluation.parts.items()}
        return {"eval/score": evaluation.score, "eval/length": evaluation.length, "eval/truncated": evaluation.truncated, **parts}

    def _policy(self) -> dict[str, float]:
        p, advantage = self.policy, self._summary("raw_advantage", "policy/advantage")
        metrics = {"policy/entropy": _masked_mean(self.batch["entropy"], self._mask), **advantage, "policy/updates": p.num_updates}
        if p.sums:
            metrics |= {
                "policy/loss": p.loss("surrogate_sum"),
                "policy/clip_low": p.per_token("clip_low_sum"),
                "policy/clip_high": p.per_token("clip_high_sum"),
                "policy/dual_clip": p.per_token("dual_clip_sum"),
                "policy/approx_kl": p.per_token("approx_kl_sum"),
                "policy/ratio_mean": p.per_token("ratio_sum"),
                "policy/ratio_max": p.maxima["ratio_max"],
                "policy/grad_norm": p.grad_norm,
                "policy/skipped_updates": p.skipped,
                "policy/stopped_early": float(p.stopped_early),
            }
        if p.lr is not None:
            metrics["policy/lr"] = p.lr
        return metrics

    def _critic(self) -> dict[str, float]:
        c = self.critic
        fit = regression_moments(self.batch["value"], self.batch["returns"], self._mask)
        metrics = {
            "critic/loss": c.loss("loss_sum"),
            "critic/explained_variance": explained_variance(fit),
            "critic/value_clip": c.per_token("value_clip_sum"),
            "critic/value_error_max": c.maxima.get("value_error_max", 0.0),
            "critic/grad_norm": c.grad_norm,
            "critic/skipped_updates": c.skipped,
            "critic/updates": c.num_updates,
            **self._summary("value", "critic/value"),
            **self._summary("returns", "critic/return"),
        }
        if c.lr is not None:
            metrics["critic/lr"] = c.lr
        return metrics

    def _kl_metrics(self) -> dict[str, float]:
        if "ref_logprob" not in self.batch:
            return {}
        d = self._kl()[self._mask]
        return {
            "kl/per_token": _mean(d),
            "kl/per_token_k3": _mean(torch.expm1(-d) + d),
            "kl/per_response": self.kl_per_response(),
            "kl/coef": self.kl_coef,
        }

    def _lengths(self) -> dict[str, float]:
        lengths = tokens_per_sequence(self._mask, self.batch.cu_seqlens).float()
        prompts = self.batch.lengths.float() - lengths
        return {
            "lengths/response_mean": _mean(lengths),
            "lengths/response_max": float(lengths.max()),
            "lengths/prompt_mean": _mean(prompts),
            "lengths/prompt_max": float(prompts.max()),
            "lengths/truncated": _mean(self.batch["truncated"].float()),
        }

    def _rollout(self) -> dict[str, float]:
        return {
            "rollout/prob_diff_mean": self.agreement.mean,
            "rollout/prob_diff_max": self.agreement.max,
            **{f"rollout/push_{name}": value for name, value in self.pushed.items()},
        }

    def _costs(self, timers: StageTimers) -> dict[str, float]:
        generated = int(self._mask.sum())
        total = timers.total_s
        costs = {f"timing/{name}_s": seconds for name, seconds in timers.seconds.items()}
        costs |= {
            "timing/step_s": total,
            "throughput/tokens_per_s": self.batch.num_tokens / total,
            "throughput/generated_tokens_per_s": generated / max(timers.seconds["generate"], 1e-9),
            "throughput/samples_per_s": self.batch.num_sequences / total,
            "memory/host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }
        if torch.cuda.is_available():
            costs["memory/device_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return costs

    @property
    def _mask(self) -> Tensor:
        return self.batch["response_mask"]

    def _kl(self) -> Tensor:
        """[T] log pi - log pi_ref on sampled tokens, 0 elsewhere."""
        return torch.where(self._mask, self.batch["logprob"] - self.batch["ref_logprob"], 0.0)

    def _per_sequence(self, name: str) -> Tensor:
        """[B] sum over the tokens of each sequence."""
        running = torch.cat([torch.zeros(1, dtype=torch.float64), self.batch[name].double().cumsum(0)])
        ends = self.batch.cu_seqlens.long()
        return running[ends[1:]] - running[ends[:-1]]

    def _summary(self, name: str, prefix: str) -> dict[str, float]:
        summary = summarise(*masked_moments(self.batch[name], self._mask))
        return {f"{prefix}_{key}": value for key, value in summary._asdict().items()}


def trajectories_of(record: StepRecord, prompts: Sequence[Prompt], count: int) -> list[dict[str, Any]]:
    """The first `count` samples of a step in full: text, token ids, and every per-token number that PPO used."""
    batch = record.batch
    rows = []
    for index in range(min(count, batch.num_sequences)):
        start, end = batch.cu_seqlens[index].item(), batch.cu_seqlens[index + 1].item()
        sampled = batch["response_mask"][start:end]
        fields = ("logprob", "rollout_logprob", "ref_logprob", "entropy", "value", "reward", "advantage", "returns")
        rows.append(
            {
                "id": prompts[index].id,
                "prompt": prompts[index].text,
                "response": record.scored.texts[index],
                "answer": prompts[index].answer,
                "score": record.scored.total[index],
                "parts": {name: values[index] for name, values in record.scored.parts.items()},
                "truncated": bool(batch["truncated"][index]),
                "version": record.step - 1,
                "prompt_tokens": batch.tokens[start:end][~sampled].tolist(),
                "response_tokens": batch.tokens[start:end][sampled].tolist(),
                **{name: batch[name][start:end][sampled].tolist() for name in fields if name in batch},
            }
        )
    return rows


def _mean(x: Tensor) -> float:
    return float(x.double().mean()) if x.numel() else 0.0


def _masked_mean(x: Tensor, mask: Tensor) -> float:
    return _mean(x[mask])
