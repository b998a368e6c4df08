"""Proximal policy optimisation with a learned critic (Schulman et al. 2017; Ouyang et al. 2022 for the KL-shaped reward).
A step has eight stages, numbered here as in the design: 1-3 in `rollout_side.py`, 4-6 in `training_side.py`, options in
`extras.py`. Every rank runs every line; a stage that needs only some ranks decides that itself."""

from __future__ import annotations

from contextlib import closing

from megappo.telemetry.timers import StageTimers
from megappo.trainer.evaluation import Evaluation, Evaluations, metrics_of
from megappo.trainer.rollout_side import RolloutSide
from megappo.trainer.run import Run
from megappo.trainer.step_record import StepRecord
from megappo.trainer.training_side import TrainingSide


class PPO:
    """The PPO loop, built by `assembly.py`. stopped: the run ended early with a checkpoint, because a rank was asked to stop.
    push_every: steps between pushes of the weights. summary_every: steps between timelines in the log."""

    def __init__(
        self,
        run: Run,
        rollout: RolloutSide,
        training: TrainingSide,
        evaluations: Evaluations,
        *,
        push_every: int,
        summary_every: int,
    ) -> None:
        self.steps, self.state, self.log = run.steps, run.state, run.log
        self.checkpoints, self.instruments, self.settle = run.checkpoints, run.instruments, run.settle
        self.rollout, self.training, self.evaluations = rollout, training, evaluations
        self.push_every, self.summary_every, self.stopped = push_every, summary_every, False

    def run(self) -> dict[str, Evaluation]:
        """Run the remaining steps, or until a stop; return each evaluation set's last result by name. Collective over the world."""
        self.rollout.push_weights(self.state.step)
        if behind := self.state.step % self.push_every:
            # A stop, an error or the run's end left this checkpoint: those that are due wait for a push.
            step = self.state.step
            self.log.note(
                f"rollout: starts with the weights of step {step}; uninterrupted, it would hold those of step {step - behind}"
            )
        results = []
        if self.state.step == 0:
            results = self.evaluations.after(0, self.instruments.timers())
            self.log.end_of_start()
        last = {result.name: result for result in results}
        while self.state.step < self.steps.last and not self.stopped:
            with self.instruments.step(self.state.step + 1), self.checkpoints.guard_step():
                last |= {result.name: result for result in self.step()}
            if not self.steps.warm_up(self.state.step):  # every role has been updated
                self.settle()
        return last

    def step(self) -> list[Evaluation]:
        """Take the next step; return the results of the evaluations after it."""
        step, rollout, training = self.state.step + 1, self.rollout, self.training
        timers = self.instruments.timers(step)

        samples = rollout.begin()
        while samples.num_open:  # again only for what dynamic sampling replaces, or without enough verdicts
            with timers.stage("prompts"):  # 1
                asked = rollout.draw_prompts(step, samples)
            with timers.stage("generate"):  # 2
                drawn = rollout.generate(asked, samples)
            with timers.stage("score"):  # 3
                rollout.score(asked, drawn, samples)
        record = training.begin(rollout.end(step, samples))

        with timers.stage("logprobs"):  # 4
            training.add_logprobs(record)

        with timers.stage("advantages"):  # 5
            training.add_advantages(record)

        with timers.stage(training.first_update):  # 6
            self.checkpoints.begin_updates()
            updates = training.begin_updates(record)
            training.update_critics(updates)
        with timers.stage("update_policy"):
            training.update_policy(updates)
        training.end_updates(record, updates, timers)

        with timers.stage("push_weights"):  # 7
            pushes = self.steps.is_due(step, self.push_every)
            record.pushed = rollout.push_weights(step) if pushes else {}

        self.instruments.settle_times(timers)  # 8
        training.end(record)
        evaluated = self.evaluations.after(step, timers)
        self.report(record, timers)
        is_last, whole = step == self.steps.last, [one for one in evaluated if one.is_whole]  # by a few scores none is the best
        self.stopped = self.checkpoints.end_of_step(step, is_last=is_last, evaluated=metrics_of(whole), is_pushed=pushes)
        return evaluated

    def report(self, record: StepRecord, timers: StageTimers) -> None:
        """Log a step. Collective over the world."""
        step = record.step
        costs = {**self.instruments.costs(record, timers), **self.rollout.source.metrics(), **self.checkpoints.metrics()}
        timeline = self.instruments.timeline(timers, step) if self.steps.is_due(step, self.summary_every) else []
        self.log.step({**record.metrics(timers), **costs}, step, self.steps.total, timeline)
        self.training.end_log(record)

    def close(self) -> None:
        with closing(self.rollout):
            self.evaluations.close()
