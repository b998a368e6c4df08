"""Value pretraining from recorded trajectories: stages 1, 4, 5, 6 and 8 of a PPO step (`ppo.py`) for the critics alone. Tokens and
token rewards come from another run; there is no policy, reference or rollout engine. `prepare/recorded.py` reads the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from megappo.algo.aggregation import tokens_per_sequence
from megappo.algo.summaries import masked_moments
from megappo.config.schema import AlgorithmConfig, GAEConfig, NoKLConfig, TrainConfig
from megappo.data.loader import PromptLoader
from megappo.data.packing import PackedBatch
from megappo.telemetry.metrics import Metric
from megappo.telemetry.timers import StageTimers
from megappo.trainer.advantages import advantages_of
from megappo.trainer.build_roles import Roles
from megappo.trainer.experience.collect import sample_seed
from megappo.trainer.experience.experience import Experience
from megappo.trainer.extras import Extra
from megappo.trainer.model_outputs import add_model_outputs
from megappo.trainer.prepare.recorded import RecordedSamples
from megappo.trainer.run import Run, StepLoop
from megappo.trainer.step_record import length_metrics
from megappo.trainer.step_totals import Totals, critic_metrics, least_explained_variance, moments_of_tokens, targets_in
from megappo.trainer.token_scans import PerToken
from megappo.trainer.updates import Updates, UpdateSummary

COLUMNS = (
    Metric.CRITIC_LOSS.value,
    Metric.CRITIC_EXPLAINED_VARIANCE.value,
    Metric.CRITIC_GRAD_NORM.value,
    Metric.SCORE_MEAN.value,
    Metric.RESPONSE_MEAN.value,
    Metric.TOKENS_PER_S.value,
    Metric.STEP_SECONDS.value,
)
"""Columns of the progress line, unless `telemetry.progress` names others."""


class RecordedPretraining(StepLoop):
    """The pretraining loop, built by `assembly.py`. device: of this rank, as in `TrainingSide`. loader: order of the trajectories.
    replicas: compares the copies of weights."""

    def __init__(
        self,
        config: TrainConfig,
        run: Run,
        roles: Roles,
        device: torch.device,
        samples: RecordedSamples,
        loader: PromptLoader,
        replicas: Extra,
    ) -> None:
        super().__init__(run)
        self.config, self.roles, self.device, self.samples = config, roles, device, samples
        self.loader, self.replicas = loader, replicas

    def step(self) -> None:
        step, config = self.state.step + 1, self.config
        timers = self.instruments.timers(step)

        with timers.stage("prompts"):  # 1, of trajectories
            experience = Experience.of_whole(self.samples.batch.select(self.loader.next_step()))

        with timers.stage("logprobs"):  # 4, of values alone
            experience = add_model_outputs(experience.to(self.device), self.roles)

        with timers.stage("advantages"):  # 5
            experience = experience.with_batch(with_returns(experience.batch, self.algorithm(step)))

        critics = self.roles.critics
        with timers.stage("update_critic"):  # 6
            self.checkpoints.begin_updates()
            updates = Updates(experience, self.roles, critics, config, sample_seed(config.run.seed, step, -1))
            for name in critics:
                updates.run(name)
        record = RecordedStep(experience, {name: updates.summary(name) for name in critics})

        self.replicas.before_push(step, timers)

        self.instruments.settle_times(timers)  # 8
        self.state.count(experience.table, record.critics.values())
        if self.steps.end_warm_up_if_fitted(step, record.explained_variance):
            self.log.note(f"critic: explains {record.explained_variance:.3f} of the returns; the run ends after step {step}")
        self.log.step({**record.metrics(timers), **self.checkpoints.metrics()}, step, self.steps.total)
        self.stopped = self.checkpoints.end_of_step(step, is_last=step == self.steps.last)

    def algorithm(self, step: int) -> AlgorithmConfig:
        """Return the settings for a step's returns, without the KL and the teacher, which the recorded rewards already contain."""
        algorithm = self.steps.algorithm(step)
        # The policy does not change, so V-trace would have ratios of 1 and the returns of GAE.
        estimator = GAEConfig() if algorithm.estimator.type == "vtrace" else algorithm.estimator
        return algorithm.model_copy(update={"kl": NoKLConfig(), "distillation": None, "estimator": estimator})


def with_returns(batch: PackedBatch, algorithm: AlgorithmConfig) -> PackedBatch:
    """Add the fields of `advantages.advantages_of` from the recorded token rewards. Collective over the world.
    batch: with token_reward, response_mask, truncated, and value and bootstrap of every critic."""
    mask, rewards = batch["response_mask"].cpu(), batch["token_reward"].cpu()
    counts = tokens_per_sequence(mask, batch.host_offsets).tolist()
    per_token: PerToken = [one.tolist() for one in rewards[mask].split(counts)]
    # Log-probs are only used in the KL, which the rewards already contain.
    batch = batch.with_fields({"logprob": torch.zeros_like(batch["token_reward"])})
    return advantages_of(batch, torch.zeros(batch.num_sequences), 0.0, algorithm, per_token)


@dataclass(frozen=True)
class RecordedStep:
    """Results of one step. experience: of this rank's trajectories. critics: by role."""

    experience: Experience
    critics: Mapping[str, UpdateSummary]

    @cached_property
    def totals(self) -> Totals:
        """Moments over all ranks. Collective over the world on the first read."""
        batch = self.experience.batch
        score = batch["score"]
        of_tokens = moments_of_tokens(batch, targets_in(batch))
        return Totals({**of_tokens, "score": masked_moments(score, ~score.isnan())})

    @property
    def explained_variance(self) -> float:
        """Least explained variance of the critics."""
        return least_explained_variance(self.totals, self.experience.batch)

    def metrics(self, timers: StageTimers) -> dict[str, float]:
        """Return metric -> value, under the names of a step that samples."""
        table = self.experience.table
        return {
            **self.totals.figures("score", "reward/score"),
            **critic_metrics(self.totals, self.experience.batch, self.critics),
            **length_metrics(table),
            **{Metric.STAGE_SECONDS.of(f"{name}_s"): seconds for name, seconds in timers.seconds.items()},
            Metric.STEP_SECONDS.value: timers.total_s,
            Metric.TOKENS_PER_S.value: table.num_tokens / timers.total_s,
            Metric.SAMPLES_PER_S.value: table.num_samples / timers.total_s,
        }
