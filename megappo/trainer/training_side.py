"""The training side of a step, stages 4 to 6: log-probs and values, advantages, updates; and what stage 8 changes beside weights.
It learns from a `rounds.Rollout`, wherever that comes from, and samples nothing itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megappo.algo.kl import KLController
from megappo.config.batch import update_schedule
from megappo.config.schema import TrainConfig
from megappo.rollout.types import SamplingParams
from megappo.telemetry.timers import StageTimers
from megappo.trainer.advantages import add_advantages
from megappo.trainer.build_roles import Roles
from megappo.trainer.experience.collect import sample_seed
from megappo.trainer.extras import Extra
from megappo.trainer.model_outputs import add_model_outputs, num_not_finite, require_finite_outputs
from megappo.trainer.prepare.data import TextData
from megappo.trainer.ptx import draw_texts
from megappo.trainer.rounds import Rollout
from megappo.trainer.run import Run
from megappo.trainer.sampler_check import compare_with_sampler, require_agreement
from megappo.trainer.step_record import StepRecord
from megappo.trainer.updates import Updates, positive_samples


class TrainingSide:
    """Stages 4 to 6 of a run. Methods belong to one step and are collective over the world.
    device: of this rank, where tokens and fields are from stage 4 on; scores, texts and lengths stay on the host. sampling: of the
    rollout side. texts: of `algorithm.ptx`. first_update: stage of the first updates."""

    def __init__(
        self,
        config: TrainConfig,
        run: Run,
        roles: Roles,
        kl_controller: KLController,
        device: torch.device,
        *,
        sampling: SamplingParams,
        texts: TextData | None = None,
        extras: Sequence[Extra] = (),
    ) -> None:
        self.roles, self.first_update = roles, "update_critic" if roles.critics else "update_policy"
        self._config, self._algorithm, self._sampling = config, config.algorithm, sampling
        self._steps, self._state, self._log = run.steps, run.state, run.log
        self._kl_controller, self._device, self._texts, self._extras = kl_controller, device, texts, extras

    def begin(self, rollout: Rollout) -> StepRecord:
        """Start the record of a step."""
        if rollout.nothing_to_learn:
            self._log.note(f"step {rollout.step}: no model is updated: {rollout.nothing_to_learn}")
        names = self.roles.critics if self._steps.warm_up(rollout.step) else self.roles.trained
        updated = () if rollout.nothing_to_learn else names
        return StepRecord(rollout=rollout, updated=updated, kl=self._algorithm.kl.estimator, kl_coef=self._kl_controller.coef)

    def add_logprobs(self, record: StepRecord) -> None:
        """Stage 4: compute log-probs of policy and reference, and values of the critics. NonFiniteOutput or SamplerMismatch on
        every rank for samples that must not be learned from."""
        step, sampler = record.step, record.rollout.sampler
        experience = record.experience = add_model_outputs(record.experience.to(self._device), self.roles)
        record.agreement = compare_with_sampler(experience.batch, self._sampling, num_not_finite(experience))
        if record.agreement.num_bad:
            require_finite_outputs(experience, self.roles.shares, sampler, step)
        # Weights before and after a step of the critic's warm-up are the same: until then age does not count.
        age = 0 if self._steps.warm_up(step - 1) else int(experience.table.ages(step).max())
        require_agreement(record.agreement, self._config.rollout.max_prob_diff, step, sampler, age)

    def add_advantages(self, record: StepRecord) -> None:
        """Stage 5: compute KL-shaped rewards, advantages and returns."""
        algorithm = self._steps.algorithm(record.step)
        shaped = add_advantages(record.experience, record.score, record.kl_coef, algorithm, record.scored.per_token)
        record.experience = shaped.experience
        record.figures = {**shaped.metrics, **record.rollout.figures}
        for extra in self._extras:
            extra.before_updates(record)

    def begin_updates(self, record: StepRecord) -> Updates:
        """Stage 6: send every updated role its data."""
        experience, seed = record.experience, sample_seed(self._config.run.seed, record.step, -1)
        positive = positive_samples(experience, record.score, self._algorithm)
        texts = None
        if self._texts is not None and record.updates_policy:
            schedule = update_schedule(self._config, "policy")
            texts = draw_texts(self._texts, schedule.optimizer_steps(experience.table.num_samples))
        return Updates(experience, self.roles, record.updated, self._config, seed, positive, texts)

    def update_critics(self, updates: Updates) -> None:
        """Stage 6: run the epochs of the critics."""
        for name in self.roles.critics:
            updates.run(name)

    def update_policy(self, updates: Updates) -> None:
        """Stage 6: run the epochs of the policy."""
        updates.run("policy")
        for extra in self._extras:
            extra.after_updates(updates)

    def end_updates(self, record: StepRecord, updates: Updates, timers: StageTimers) -> None:
        """Store the summaries of the updates."""
        record.critics = {name: updates.summary(name) for name in self.roles.critics}
        record.policy = updates.summary("policy")
        for extra in self._extras:
            extra.before_push(record.step, timers)

    def end(self, record: StepRecord) -> None:
        """Stage 8: move the KL coefficient and the counters, and end the critics' warm-up if they fit."""
        step = record.step
        # During the critic's warm-up the policy does not change, and its KL says nothing about the coefficient.
        if record.updates_policy:
            self._kl_controller.update(record.kl_per_response(), record.experience.table.num_trajectories)
            for extra in self._extras:
                extra.after_step(record)
        self._state.count(record.experience.table, record.critics.values(), record.policy)
        if self._steps.warm_up(step) and self._steps.end_warm_up_if_fitted(step, record.explained_variance):
            self._log.note(f"critic: explains {record.explained_variance:.3f} of the returns; its warm-up ends after step {step}")

    def end_log(self, record: StepRecord) -> None:
        """Stage 8: log what the extras add to the step's metrics."""
        for extra in self._extras:
            extra.after_log(record)
