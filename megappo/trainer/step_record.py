"""Report of a step: its metrics by name. One exchange of sums and one of maxima combine the samples of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from megappo.algo.aggregation import sums_per_sequence
from megappo.algo.summaries import masked_moments, summarise
from megappo.data.packing import PackedBatch
from megappo.rewards.compose import Scored
from megappo.telemetry.metrics import Metric
from megappo.telemetry.timers import StageTimers
from megappo.trainer.experience.table import SampleTable
from megappo.trainer.left_out import REDRAWN
from megappo.trainer.rounds import Rollout
from megappo.trainer.sampler_check import Agreement
from megappo.trainer.step_totals import (
    Totals,
    Turns,
    critic_metrics,
    expert_metrics,
    least_explained_variance,
    moments_of_tokens,
    moments_of_turns,
    targets_in,
)
from megappo.trainer.updates import UpdateSummary


@dataclass(kw_only=True)
class StepRecord:
    """Results of one PPO step, as far as its stages are done.
    rollout: of stages 1 to 3. updated: roles that the step updates. kl: estimator of the KL to the reference. kl_coef: its
    coefficient. agreement: of stage 4. experience: this rank's samples with the fields so far. figures: of stage 5, by metric.
    critics (by role), policy: updates of stage 6. pushed: figures of stage 7."""

    rollout: Rollout
    updated: Collection[str] = ()
    kl: str = "k1"
    kl_coef: float = 0.0
    agreement: Agreement = Agreement(0.0, 0.0)
    figures: dict[str, float] = field(default_factory=dict)
    critics: Mapping[str, UpdateSummary] = field(default_factory=dict)
    policy: UpdateSummary = field(default_factory=UpdateSummary)
    pushed: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.experience = self.rollout.experience

    @property
    def step(self) -> int:
        return self.rollout.step

    @property
    def scored(self) -> Scored:
        return self.rollout.scored

    @property
    def updates_policy(self) -> bool:
        """True if the step updates the policy: it has something to learn and is no critic warm-up."""
        return "policy" in self.updated

    @cached_property
    def score(self) -> Tensor:
        """[B] fp32, scores of this rank's samples."""
        return torch.tensor(self.scored.total, dtype=torch.float32)

    @property
    def batch(self) -> PackedBatch:
        return self.experience.batch

    @cached_property
    def totals(self) -> Totals:
        """Moments over all ranks. Collective over the world on the first read."""
        with torch.inference_mode():  # a sixth less for each of some hundred calls on a few numbers
            of_samples = {name: masked_moments(x, mask) for name, (x, mask) in self._of_samples().items()}
            kinds = {self.kl, "k1", "k3"}
            of_tokens = moments_of_tokens(self.batch, targets_in(self.batch), ["raw_advantage"], ["entropy"], kinds)
            moments = {**of_tokens, **of_samples, **moments_of_turns(self.rollout.played)}
            retries = torch.tensor(list(self.scored.retries.values()), dtype=torch.float64)
            return Totals(moments, {"retries": retries})

    def _of_samples(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return name -> (values [B], mask [B])."""
        scored, ends = self.scored, self.experience.table.ends[self.experience.numbers]
        if scored.no_verdict:  # a step with no score at all, of which nothing is left out
            ends = ends & torch.tensor([not reason for reason in scored.no_verdict])
        shaped = sums_per_sequence(self.batch["reward"], self.batch.cu_seqlens, torch.float64).cpu()
        values = {"score": self.score, "shaped": shaped}
        if scored.model_total is not None:
            values["models"] = torch.tensor(scored.model_total, dtype=torch.float32)
            values["rules"] = self.score - values["models"]
        found = {name: (x, ends) for name, x in values.items()}
        for name, part in scored.parts.items():
            x = torch.tensor(part, dtype=torch.float32)
            found[f"part {name}"] = (x, ~x.isnan())  # NaN: another recipe's, or the response goes on
        for label in scored.recipe_labels:
            found[f"route {label}"] = (self.score, ends & torch.tensor([one == label for one in scored.labels], dtype=torch.bool))
        if scored.early_s is not None:
            found["early"] = (torch.tensor([scored.early_s], dtype=torch.float64), torch.ones(1, dtype=torch.bool))
        for name, part in scored.seconds.items():
            seconds = torch.tensor(part, dtype=torch.float64)
            found[f"seconds {name}"] = (seconds, torch.ones(seconds.shape, dtype=torch.bool))
        return found

    def kl_per_response(self) -> float:
        """Return the mean over responses of the sum over tokens of log pi - log pi_ref, in nats; 0 without a reference."""
        if "kl k1" not in self.totals:
            return 0.0
        # Always k1: it sums to log pi(y) / pi_ref(y), whose mean is the KL of whole responses that the adaptive controller targets.
        return self._per_response("kl k1")

    def _per_response(self, name: str) -> float:
        return float(self.totals[name][1]) / max(1, self.experience.table.num_trajectories)

    def metrics(self, timers: StageTimers) -> dict[str, float]:
        """Return metric -> value. Costs that need the models or other ranks: `instruments.py`."""
        return {
            **self._reward(),
            **self._policy(),
            **critic_metrics(self.totals, self.batch, self.critics),
            **self._kl_metrics(),
            **self.figures,
            **length_metrics(self.experience.table),
            **self._rollout(),
            **self._costs(timers),
            **({} if self.rollout.rounds is None else self.rollout.rounds.metrics()),
        }

    def _reward(self) -> dict[str, float]:
        return {
            **self.totals.figures("score", "reward/score"),
            **self.totals.figures("shaped", "reward/shaped"),
            **self._without_verdict(),
            **self._reward_parts(),
            **self._routes(),
        }

    def _without_verdict(self) -> dict[str, float]:
        left_out, redrawn = self.rollout.left_out, self.rollout.redrawn
        counts = {} if left_out is None else dict(sorted(left_out.counts.items()))
        counts |= {REDRAWN: redrawn} if redrawn else {}
        by_reason = {Metric.NO_VERDICT.of(reason): count for reason, count in counts.items()}
        return {Metric.WITHOUT_VERDICT.value: 0.0 if left_out is None else left_out.share, **by_reason}

    def _reward_parts(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name in self.scored.parts:
            count = float(self.totals[f"part {name}"][0])
            if not count:
                continue  # no sample's recipe has the part
            summary = self.totals.summary(f"part {name}")._asdict()
            found[Metric.REWARD_PART.of(name)] = summary.pop("mean")
            found |= {Metric.REWARD_PART.of(f"{name}/{key}"): value for key, value in summary.items()}
            if count < (num_scored := int(self.experience.table.ends.sum())):
                found[Metric.REWARD_PART.of(f"{name}/share")] = count / num_scored
        for name, count in zip(self.scored.retries, self.totals["retries"].tolist()):
            found[Metric.REWARD_PART.of(f"{name}/retries")] = int(count)
        for metric, name in (("reward/models", "models"), ("reward/rules", "rules")):
            if name in self.totals:
                found |= self.totals.figures(name, metric)
        return found

    def _routes(self) -> dict[str, float]:
        counts = {label: int(self.totals[f"route {label}"][0]) for label in self.scored.recipe_labels}
        drawn = sorted(label for label, count in counts.items() if count)
        means = {Metric.REWARD_ROUTE.of(f"{label}/mean"): self.totals.mean(f"route {label}") for label in drawn}
        return means | {Metric.REWARD_ROUTE.of(f"{label}/count"): counts[label] for label in drawn}

    def _policy(self) -> dict[str, float]:
        p = self.policy
        metrics = {
            Metric.POLICY_ENTROPY.value: self.totals.mean("entropy"),
            Metric.POLICY_UPDATES.value: p.num_updates,
            **self.totals.figures("raw_advantage", "policy/advantage"),
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
        if "nll_sum" in p.sums:
            metrics[Metric.POLICY_POSITIVE_NLL.value] = p.sums["nll_sum"] / max(p.sums["nll_tokens_sum"], 1.0)
        if "ptx_sum" in p.sums:
            metrics[Metric.POLICY_PTX_LOSS.value] = p.sums["ptx_sum"] / max(p.sums["ptx_tokens_sum"], 1.0)
        if p.sums.get("routes_sum"):
            metrics[Metric.POLICY_REROUTED.value] = p.sums["rerouted_sum"] / p.sums["routes_sum"]
        if p.lr is not None:
            metrics[Metric.POLICY_LR.value] = p.lr
        return metrics | expert_metrics("policy", p.expert_tokens, p.balance_loss)

    @property
    def explained_variance(self) -> float:
        """Least explained variance of the critics."""
        return least_explained_variance(self.totals, self.batch)

    def _kl_metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        if "kl teacher" in self.totals:
            found[Metric.KL_TEACHER_TOKEN.value] = self.totals.mean("kl teacher")
            found[Metric.KL_TEACHER_RESPONSE.value] = self._per_response("kl teacher")
        if "kl k1" not in self.totals:
            return found
        return found | {
            Metric.KL_TOKEN.value: self.totals.mean(f"kl {self.kl}"),
            Metric.KL_TOKEN_K3.value: self.totals.mean("kl k3"),
            Metric.KL_RESPONSE.value: self.kl_per_response(),
            Metric.KL_COEF.value: self.kl_coef,
        }

    def _rollout(self) -> dict[str, float]:
        table = self.experience.table
        kept, ages = self.agreement.kept, table.ages(self.step)
        return {
            **({Metric.SEQUENCES.value: table.num_samples / table.num_trajectories} if table.has_chains else {}),
            **({} if (turns := Turns.of(self.totals)) is None else turns.metrics()),
            Metric.AGE_MEAN.value: _mean(ages),
            Metric.AGE_MAX.value: int(ages.max()),
            Metric.PROB_DIFF_MEAN.value: self.agreement.mean,
            Metric.PROB_DIFF_MAX.value: self.agreement.max,
            **({} if kept is None else {Metric.KEPT_IDS.value: kept.ids, Metric.KEPT_OVERFLOW.value: kept.overflow}),
            **{f"rollout/push_{name}": value for name, value in self.pushed.items()},
        }

    def _costs(self, timers: StageTimers) -> dict[str, float]:
        table, total = self.experience.table, timers.total_s
        slow = {
            Metric.REWARD_SECONDS.of(f"{name}/{key}_s"): value
            for name in self.scored.seconds
            if float(self.totals[f"seconds {name}"][0])
            for key, value in self.totals.summary(f"seconds {name}")._asdict().items()
            if key in ("mean", "max")
        }
        if (turns := Turns.of(self.totals)) is not None and turns.answers:
            slow[Metric.ENVIRONMENT_MEAN.value] = turns.answers["mean_s"]
            slow[Metric.ENVIRONMENT_MAX.value] = turns.answers["max_s"]
            slow[Metric.ENVIRONMENT_SECONDS.value] = turns.answers["total_s"]
        if "early" in self.totals:
            slow[Metric.REWARD_EARLY.value] = self.totals.summary("early").max
        return {
            **{Metric.STAGE_SECONDS.of(f"{name}_s"): seconds for name, seconds in timers.seconds.items()},
            **slow,
            Metric.STEP_SECONDS.value: total,
            Metric.TOKENS_PER_S.value: table.num_tokens / total,
            Metric.GENERATED_PER_S.value: int(self.generated[1].sum()) / max(timers.seconds["generate"], 1e-9),
            Metric.SAMPLES_PER_S.value: table.num_trajectories / total,
        }

    @property
    def generated(self) -> tuple[Tensor, Tensor]:
        """Tokens of every generated sample of all ranks, also replaced and left-out ones, and of its response, [M] int32 each."""
        left_out, rounds = self.rollout.left_out, self.rollout.rounds
        table = self.experience.table if left_out is None else left_out.experience.table
        if rounds is None:
            return table.length, table.sampled
        return torch.cat([table.length, rounds.length]), torch.cat([table.sampled, rounds.sampled])


def length_metrics(table: SampleTable) -> dict[str, float]:
    """Return the metrics of response, prompt and sequence lengths in tokens."""
    ends = table.ends
    prompts = (table.length - table.response).float()
    return {
        **{f"lengths/response_{key}": value for key, value in _summary_of(table.response[ends]).items()},
        Metric.PROMPT_MEAN.value: _mean(prompts),
        Metric.PROMPT_MAX.value: float(prompts.max()),
        **{Metric.TOTAL_LENGTH.of(key): value for key, value in _summary_of(table.length).items()},
        Metric.TRUNCATED.value: _mean(table.truncated[ends].float()),
    }


def _summary_of(x: Tensor) -> dict[str, float]:
    return summarise(*masked_moments(x, torch.ones_like(x, dtype=torch.bool)))._asdict()


def _mean(x: Tensor) -> float:
    return float(x.double().mean()) if x.numel() else 0.0
