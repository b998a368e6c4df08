"""Proximal policy optimisation with a learned critic (Schulman et al. 2017; Ouyang et al. 2022 for the KL-shaped reward).

One step has eight stages, numbered here as in the design. Every rank runs every line: a stage that needs only some ranks decides
that inside. Nothing tensor-level happens here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megappo.algo.kl import KLController
from megappo.data.packing import PackedBatch
from megappo.data.prompts import Prompt, PromptLoader
from megappo.data.tokenizers import Tokenizer
from megappo.rewards.compose import Scorer
from megappo.rollout.types import RolloutEngine, SamplingParams
from megappo.telemetry.runlog import RunLog
from megappo.telemetry.timers import StageTimers
from megappo.trainer.evaluation import Evaluation, evaluate
from megappo.trainer.experience import make_requests, pack_experience, sample_seed
from megappo.trainer.report import StepRecord, trajectories_of
from megappo.trainer.roles import Critic, LanguageModel, Policy, add_model_outputs
from megappo.trainer.sampler_check import compare_with_sampler, require_agreement
from megappo.trainer.scoring import score_responses
from megappo.trainer.shaping import AdvantageShaping
from megappo.trainer.state import TrainerState
from megappo.trainer.updates import MiniBatches, UpdateSummary, run_updates


@dataclass(frozen=True)
class PPOSettings:
    """Numbers of the loop. Intervals are in PPO steps; 0 means never."""

    total_steps: int
    seed: int
    samples_per_prompt: int
    critic_warmup_steps: int
    max_prob_diff: float
    eval_every: int
    eval_before: bool
    save_every: int
    trajectories_every: int
    trajectories_per_step: int


class PPO:
    """The loop. Its parts are built in `main.py`; `save` writes a checkpoint of all of them.

    stop_agreed: collective; whether any rank was asked to stop. The run then ends after the present step, with a checkpoint.
    """

    def __init__(
        self,
        settings: PPOSettings,
        *,
        policy: Policy,
        critic: Critic,
        reference: LanguageModel | None,
        rollout: RolloutEngine,
        sampling: SamplingParams,
        prompts: Sequence[Prompt],
        loader: PromptLoader,
        eval_prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
        scorer: Scorer,
        shaping: AdvantageShaping,
        kl_controller: KLController,
        mini_batches: MiniBatches,
        state: TrainerState,
        log: RunLog,
        save: Callable[[int], None],
        settle: Callable[[], None],
        stop_agreed: Callable[[], bool],
    ) -> None:
        self.settings = settings
        self.policy, self.critic, self.reference = policy, critic, reference
        self.rollout, self.sampling = rollout, sampling
        self.prompts, self.loader, self.eval_prompts = prompts, loader, eval_prompts
        self.tokenizer, self.scorer = tokenizer, scorer
        self.shaping, self.kl_controller, self.mini_batches = shaping, kl_controller, mini_batches
        self.state, self.log, self.save = state, log, save
        self.settle = settle
        self.stop_agreed, self.stopped = stop_agreed, False

    def run(self) -> Evaluation | None:
        """All remaining steps, or those until a stop; returns the last evaluation."""
        self.push_weights(self.state.step)
        evaluation = None
        if self.settings.eval_before and self.state.step == 0:
            evaluation = self.evaluate()
        while self.state.step < self.settings.total_steps and not self.stopped:
            evaluation = self.step() or evaluation
            if self.state.step > self.settings.critic_warmup_steps:  # every role has been updated
                self.settle()
        return evaluation

    def step(self) -> Evaluation | None:
        step = self.state.step + 1
        timers = StageTimers()

        with timers.stage("prompts"):  # 1
            chosen = [self.prompts[i] for i in self.loader.next_step()]
            n = self.settings.samples_per_prompt
            requests = make_requests([p.tokens for p in chosen], n, self.settings.seed, step)
            asked = [prompt for prompt in chosen for _ in range(n)]

        with timers.stage("generate"):  # 2
            responses = self.rollout.generate(requests, self.sampling)
            self.rollout.sleep()
            batch = pack_experience(requests, responses)

        with timers.stage("score"):  # 3
            scored = score_responses(asked, responses, self.tokenizer, self.scorer, self.sampling.stop)

        with timers.stage("logprobs"):  # 4
            batch = add_model_outputs(batch, self.policy, self.critic, self.reference)
            agreement = compare_with_sampler(batch, self.sampling)
            require_agreement(agreement, self.settings.max_prob_diff, step, self.rollout.name)

        with timers.stage("advantages"):  # 5
            kl_coef = self.kl_controller.coef
            batch = self.shaping.apply(batch, torch.tensor(scored.total), kl_coef)

        with timers.stage("update_critic"):  # 6
            seed = sample_seed(self.settings.seed, step, -1)
            critic = run_updates(self.critic, batch, self.mini_batches, seed)
        with timers.stage("update_policy"):
            policy = UpdateSummary()
            if step > self.settings.critic_warmup_steps:
                policy = run_updates(self.policy, batch, self.mini_batches, seed)

        with timers.stage("push_weights"):  # 7
            pushed = self.push_weights(step)

        kl_estimator = self.shaping.kl_estimator  # 8
        record = StepRecord(step, batch, scored, agreement, kl_estimator, kl_coef, critic, policy, pushed)
        if step > self.settings.critic_warmup_steps:  # before, the policy stands still and its KL says nothing about the factor
            self.kl_controller.update(record.kl_per_response(), batch.num_sequences)
        self.count(batch, critic, policy)
        evaluation = self.evaluate(timers) if self.is_due(step, self.settings.eval_every) else None
        self.log.step(record.metrics(timers, evaluation), step, self.settings.total_steps)
        if self.settings.trajectories_every and step % self.settings.trajectories_every == 0:
            self.log.trajectories(step, trajectories_of(record, asked, self.settings.trajectories_per_step))
        self.stopped = step < self.settings.total_steps and self.stop_agreed()
        if self.is_due(step, self.settings.save_every) or step == self.settings.total_steps or self.stopped:
            self.save(step)
        return evaluation

    def push_weights(self, version: int) -> dict[str, float]:
        """The policy's present weights into the rollout engine; they must be resident for that."""
        with self.policy.engine.eval_mode():
            return self.rollout.push_weights(version)

    def evaluate(self, timers: StageTimers | None = None) -> Evaluation | None:
        """Greedy score on the held-out prompts with the weights that the rollout engine holds."""
        if not self.eval_prompts:
            return None
        with (timers or StageTimers()).stage("evaluate"):
            evaluation = evaluate(self.eval_prompts, self.rollout, self.sampling, self.tokenizer, self.scorer)
        self.log.evaluation(evaluation, self.state.step)
        return evaluation

    def is_due(self, step: int, interval: int) -> bool:
        return interval > 0 and (step % interval == 0 or step == self.settings.total_steps)

    def count(self, batch: PackedBatch, critic: UpdateSummary, policy: UpdateSummary) -> None:
        self.state.step += 1
        self.state.episodes += batch.num_sequences
        self.state.tokens += int(batch["response_mask"].sum())
        self.state.critic_updates += critic.num_updates
        self.state.policy_updates += policy.num_updates
