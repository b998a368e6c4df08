"""Proximal policy optimisation with a learned critic (Schulman et al. 2017; Ouyang et al. 2022 for the KL-shaped reward).

One step has eight stages, numbered here as in the design. Every rank runs every line; a stage that needs only some ranks decides
that itself. Experience lies distributed: each rank has some samples, and all have a table of all samples. Nothing tensor-level
happens here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from functools import partial

import torch

from megappo.algo.kl import KLController
from megappo.config.batch import update_schedule
from megappo.config.schema import TrainConfig
from megappo.data.loader import PromptLoader
from megappo.data.prompts import Prompt
from megappo.data.tokenizers import Tokenizer
from megappo.rewards.scorer import Scorer
from megappo.rollout.generation import generate
from megappo.rollout.types import Played, Request, RolloutEngine, SamplingParams
from megappo.telemetry.metrics import Metric
from megappo.telemetry.runlog import RunLog
from megappo.telemetry.timers import StageTimers
from megappo.trainer.average import PolicyAverage
from megappo.trainer.build_roles import Roles
from megappo.trainer.checkpoints import Checkpoints
from megappo.trainer.curriculum import curriculum_metrics, observe_pass_rates
from megappo.trainer.dynamic_sampling import StepSamples
from megappo.trainer.entropy import EntropyBonus
from megappo.trainer.evaluation import Evaluation, Evaluations, metrics_of
from megappo.trainer.experience.collect import collect, prompt_of_sample, requests_of_step, sample_seed
from megappo.trainer.experience.experience import Experience
from megappo.trainer.finite_outputs import num_not_finite, require_finite_outputs
from megappo.trainer.greedy import draw_greedy, score_greedy
from megappo.trainer.histograms import histograms_of
from megappo.trainer.instruments import Instruments
from megappo.trainer.model_outputs import add_model_outputs
from megappo.trainer.prepare.data import TextData
from megappo.trainer.ptx import DrawnTexts, draw_texts
from megappo.trainer.refresh import ReferenceRefresh
from megappo.trainer.report import StepRecord
from megappo.trainer.response_lengths import ResponseLengths
from megappo.trainer.sampler_check import average_version, compare_with_sampler, require_agreement, require_version
from megappo.trainer.scoring import begin_rewards, score_responses
from megappo.trainer.shaping import shape_experience
from megappo.trainer.state import TrainerState
from megappo.trainer.trajectories import draw_samples, trajectories_of
from megappo.trainer.updates import Updates, positive_samples
from megappo.trainer.usable import nothing_to_learn
from megappo.trainer.warmup import CriticWarmup
from megappo.trainer.windows import Windows


class PPO:
    """The loop. Its parts are built in `main.py`. stopped: a rank was asked to stop, and the run ended early with a checkpoint.

    average: of the policy's weights, None without one and on ranks without the policy. texts: None without `algorithm.ptx`.
    check_replicas: collective; raises if ranks hold different copies of a weight. instruments: measure the steps.
    """

    def __init__(
        self,
        config: TrainConfig,
        total_steps: int,
        *,
        roles: Roles,
        average: PolicyAverage | None,
        rollout: RolloutEngine,
        sampling: SamplingParams,
        prompts: Sequence[Prompt],
        loader: PromptLoader,
        texts: TextData | None,
        evaluations: Evaluations,
        tokenizer: Tokenizer,
        scorer: Scorer,
        kl_controller: KLController,
        refresh: ReferenceRefresh,
        state: TrainerState,
        log: RunLog,
        checkpoints: Checkpoints,
        settle: Callable[[], None],
        check_replicas: Callable[[], None],
        instruments: Instruments,
    ) -> None:
        self.config, self.total_steps, self.warmup = config, total_steps, CriticWarmup(config, state)
        self.roles, self.average = roles, average
        self.rollout, self.sampling = rollout, sampling
        self.prompts, self.loader, self.texts, self.evaluations = prompts, loader, texts, evaluations
        self.tokenizer, self.scorer = tokenizer, scorer
        self.kl_controller, self.refresh, self.state = kl_controller, refresh, state
        self.entropy_bonus = EntropyBonus(config.algorithm, state)
        self.log, self.checkpoints = log, checkpoints
        self.settle, self.stopped = settle, False
        self.check_replicas, self.instruments = check_replicas, instruments
        self.windows = None if config.rollout.window_tokens is None else Windows(config, prompts, loader, state)
        self.lengths = ResponseLengths(len(prompts))
        # Samples of a row and rows of a step; in windows each sample has a row of its own, as those of a prompt end apart.
        each = config.rollout.samples_per_prompt, loader.prompts_per_step
        self.samples_per_row, self.rows_per_step = each if self.windows is None else (1, self.windows.num_samples)

    def run(self) -> dict[str, Evaluation]:
        """Run all remaining steps, or those until a stop; returns the last result of every evaluation set by its name."""
        self.push_weights(self.state.step)
        if behind := self.state.step % self.config.rollout.push_every:
            # A stop, an error or the run's end left this checkpoint: those that are due wait for a push.
            step = self.state.step
            self.log.note(
                f"rollout: starts with the weights of step {step}; uninterrupted, it would hold those of step {step - behind}"
            )
        results = []
        if self.state.step == 0:
            results = self.evaluate(0, self.instruments.timers())
            self.log.end_of_start()
        last = {result.name: result for result in results}
        while self.state.step < self.last_step and not self.stopped:
            with self.instruments.step(self.state.step + 1), self.checkpoints.guard_step():
                last |= {result.name: result for result in self.step()}
            if not self.warmup.covers(self.state.step):  # every role has been updated
                self.settle()
        return last

    def close(self) -> None:
        """End the workers of the rewards, those of evaluations too."""
        with closing(self.scorer):
            self.evaluations.close()

    def step(self) -> list[Evaluation]:
        step, config, n = self.state.step + 1, self.config, self.samples_per_row
        timers = self.instruments.timers(step)

        samples, played = StepSamples(config.algorithm.dynamic_sampling, self.rows_per_step, n), list[Played]()
        while samples.num_open:  # again only for what dynamic sampling replaces
            with timers.stage("prompts"):  # 1
                rows, requests = self.draw(step, samples)
                prompt_of = partial(prompt_of_sample, self.prompts, rows, n)

            with timers.stage("generate"):  # 2
                if samples.num_drawn and config.rollout.sleep == "all":
                    self.push_weights(self.state.step)  # they were released for the scoring of the round before
                begin = begin_rewards(prompt_of, self.tokenizer, self.scorer, self.sampling.stop, requests)
                predicted = None if self.windows is not None else self.lengths.predict(rows, n)
                responses = generate(self.rollout, requests, self.sampling, begin, predicted)
                greedy = draw_greedy(self.rollout, requests, self.sampling) if config.algorithm.estimator == "remax" else None
                self.rollout.sleep()
                in_windows, with_kept = self.windows is not None, self.sampling.kept_width > 0
                drawn = collect(requests, responses, with_kept=with_kept, in_windows=in_windows)
                self.lengths.observe(rows, drawn.table)
                played += [one.played for one in responses if one.played is not None]
                require_version(drawn.table, step, config.rollout.push_every, self.rollout.name)

            with timers.stage("score"):  # 3
                scoring = self.tokenizer, self.scorer, self.sampling.stop
                scores = score_responses(drawn, prompt_of, *scoring)
                baseline = None if greedy is None else score_greedy(greedy, drawn, lambda group: prompt_of(group * n), *scoring)
                samples.add(rows, drawn, scores)
                observe_pass_rates(self.loader, rows, drawn, scores)
        experience, scored = samples.result()
        prompt_of = partial(prompt_of_sample, self.prompts, samples.rows, n)
        of_windows = {} if self.windows is None else self.windows.end(experience)
        num_scored = samples.num_drawn if config.algorithm.dynamic_sampling is not None else None
        if reason := nothing_to_learn(experience.table, scored, num_scored):
            self.log.note(f"step {step}: no model is updated: {reason}")

        with timers.stage("logprobs"):  # 4
            experience = add_model_outputs(experience, self.roles)
            agreement = compare_with_sampler(experience.batch, self.sampling, num_not_finite(experience))
            if agreement.num_bad:
                require_finite_outputs(experience, self.roles.shares, self.rollout.name, step)
            age = int(experience.table.ages(step).max())
            require_agreement(agreement, config.rollout.max_prob_diff, step, self.rollout.name, age)

        with timers.stage("advantages"):  # 5
            kl_coef, score = self.kl_controller.coef, torch.tensor(scored.total)
            shaped = shape_experience(experience, score, kl_coef, self.warmup.algorithm(step), scored.per_token, baseline)
            experience, figures = shaped.experience, {**shaped.metrics, **of_windows}
            if not (reason or self.warmup.covers(step)):
                figures |= self.set_entropy_bonus(experience)

        critics = self.roles.critics
        with timers.stage("update_critic" if critics else "update_policy"):  # 6
            self.checkpoints.begin_updates()
            updated = () if reason else critics if self.warmup.covers(step) else self.roles.trained
            counts_ratios = self.is_due(step, config.telemetry.histogram_interval)
            seed, positive = sample_seed(config.run.seed, step, -1), positive_samples(experience, score, config.algorithm)
            texts = self.draw_texts(experience) if "policy" in updated else None
            updates = Updates(experience, self.roles, updated, config, seed, counts_ratios, positive, texts)
            for name in critics:
                updates.run(name)
        with timers.stage("update_policy"):
            updates.run("policy")
            if self.average is not None and updates.changed("policy"):
                self.average.update()
        of_critics, policy = {name: updates.summary(name) for name in critics}, updates.summary("policy")

        if self.is_due(step, config.run.replica_check_every):  # before wrong weights reach the sampler or a checkpoint
            with timers.stage("check_replicas"):
                self.check_replicas()

        pushes = self.is_due(step, config.rollout.push_every)
        with timers.stage("push_weights"):  # 7
            pushed = self.push_weights(step) if pushes else {}

        self.instruments.settle_times(timers)  # 8
        kl_kind = config.algorithm.kl.estimator
        record = StepRecord(
            step, experience, scored, agreement, kl_kind, kl_coef, of_critics, policy, pushed, figures, samples.rounds(), played
        )
        # During the critic's warm-up the policy does not change, and its KL says nothing about the coefficient.
        if not (reason or self.warmup.covers(step)):
            self.kl_controller.update(record.kl_per_response(), experience.table.num_trajectories)
            if self.refresh.is_due(step, record.kl_per_response()):
                self.refresh.copy(step)
                self.log.note(f"reference: refreshed from the {config.reference.refresh_from} after step {step}")
        self.count(record)
        if self.warmup.covers(step) and self.warmup.end_if_fitted(step, record.explained_variance):
            self.log.note(f"critic: explains {record.explained_variance:.3f} of the returns; its warm-up ends after step {step}")
        evaluated = self.evaluate(step, timers)
        costs = {**self.instruments.costs(record, timers), **curriculum_metrics(self.loader)}
        timeline = self.instruments.timeline(timers, step) if self.is_due(step, config.telemetry.summary_every) else []
        self.log.step({**record.metrics(timers), **costs, **self.checkpoints.metrics()}, step, self.total_steps, timeline)
        if config.telemetry.trajectories_every and step % config.telemetry.trajectories_every == 0:
            drawn = draw_samples(len(samples.rows) * n, n, config.telemetry.trajectories_per_step, config.run.seed, step)
            self.log.trajectories(step, trajectories_of(record, prompt_of, drawn, self.tokenizer))
        if counts_ratios:
            self.log.histograms(step, histograms_of(record))
        is_last, of_evaluation = step == self.last_step, metrics_of(evaluated)
        self.stopped = self.checkpoints.end_of_step(step, is_last=is_last, evaluated=of_evaluation, is_pushed=pushes)
        return evaluated

    def draw(self, step: int, samples: StepSamples) -> tuple[list[int], Sequence[Request]]:
        """Rows of the prompts of the next round of a step, and the requests of their samples."""
        if self.windows is not None:
            return self.windows.begin(step)
        rows = self.loader.next_step(samples.num_open)
        n, seed = self.samples_per_row, self.config.run.seed
        return rows, requests_of_step(self.prompts, rows, n, seed, step, samples.num_drawn)

    def set_entropy_bonus(self, experience: Experience) -> dict[str, float]:
        """Set the coefficient of the bonus in this step's updates of the policy; returns it as a metric if it is steered."""
        coef = self.entropy_bonus.coef_of(experience)
        if self.roles.policy is not None:
            self.roles.policy.entropy_coef = coef
        return {} if self.config.algorithm.entropy.type == "bonus" else {Metric.POLICY_ENTROPY_COEF.value: coef}

    def draw_texts(self, experience: Experience) -> DrawnTexts | None:
        """Texts of this step's updates of the policy; None without `algorithm.ptx`."""
        if self.texts is None:
            return None
        return draw_texts(self.texts, update_schedule(self.config, "policy").optimizer_steps(experience.table.num_samples))

    def push_weights(self, version: int) -> dict[str, float]:
        """Push the policy's current weights into the rollout engine; they must be resident."""
        with nullcontext() if self.roles.policy is None else self.roles.policy.engine.eval_mode():
            return self.rollout.push_weights(version)

    def evaluate(self, step: int, timers: StageTimers) -> list[Evaluation]:
        """Evaluate what is due after `step`, with the weights of `trainer.evaluate_with`; then the sampler has the policy's."""
        if self.config.trainer.evaluate_with == "policy" or not self.evaluations.any_due(step):
            return self.evaluations.after(step, timers)
        with nullcontext() if self.average is None else self.average.in_place():
            self.push_weights(average_version(step))
            results = self.evaluations.after(step, timers)
        self.push_weights(step)
        return results

    def is_due(self, step: int, interval: int) -> bool:
        return interval > 0 and (step % interval == 0 or step == self.last_step)

    @property
    def last_step(self) -> int:
        return self.warmup.last_step(self.total_steps)

    def count(self, record: StepRecord) -> None:
        table, critics, policy = record.experience.table, record.critics.values(), record.policy
        self.state.step += 1
        self.state.episodes += int(table.ends.sum())
        self.state.tokens += int(table.sampled.sum())
        self.state.critic_updates += sum(critic.num_updates for critic in critics)
        self.state.policy_updates += policy.num_updates
        self.state.critic_skipped += sum(critic.skipped for critic in critics)
        self.state.policy_skipped += policy.skipped
