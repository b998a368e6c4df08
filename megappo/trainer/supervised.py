"""Supervised training: stages 1, 4, 6 and 8 of a PPO step (`ppo.py`) on given examples, with everything around a step that PPO has.
A kind (`trainer/kinds/`) says what is learned; `prepare/supervised.py` reads the examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megappo.config.evaluations import metric_name
from megappo.config.supervised import SupervisedConfig
from megappo.data.examples import Examples
from megappo.data.packing import PackedBatch
from megappo.engine.base import Engine, PassResult, StepResult
from megappo.engine.losses import LossOutput
from megappo.parallel.totals import total
from megappo.telemetry.metrics import Metric, of_kind
from megappo.telemetry.timers import StageTimers
from megappo.trainer.build_roles import Roles
from megappo.trainer.evaluation import Evaluations, metrics_of
from megappo.trainer.extras import Extra
from megappo.trainer.kinds.dpo import Dpo
from megappo.trainer.kinds.kind import Drawn, Kind, Share
from megappo.trainer.kinds.reward_model import RewardTraining
from megappo.trainer.kinds.sft import Sft
from megappo.trainer.prepare.supervised import SupervisedData
from megappo.trainer.run import Run, StepLoop
from megappo.trainer.step_totals import expert_metrics

KINDS: dict[str, type[Kind[Any]]] = {"sft": Sft, "reward_model": RewardTraining, "dpo": Dpo}
"""Kind -> its class. A new one needs an entry here, in `config.supervised.KINDS`, `prepare.supervised.READERS` and
`commands.sft.COMMANDS`."""


@dataclass(frozen=True)
class Update:
    """Results of one optimizer step. result: of its pass, without results per token."""

    result: PassResult
    lr: float
    taken: StepResult


@dataclass(frozen=True)
class HeldOut:
    """Figures of one set of held-out examples. name: empty for the set of `data.eval`."""

    name: str
    count: int
    figures: Mapping[str, float]

    def metrics(self) -> dict[str, float]:
        return {metric_name(self.name, figure): value for figure, value in self.figures.items()}

    def describe(self) -> str:
        named = ", ".join(f"{figure} {value:.4f}" for figure, value in self.figures.items())
        return f"{self.name or 'held-out'}: {named} on {self.count:,} examples"


def columns_of_kind(config: SupervisedConfig) -> tuple[str, ...]:
    """Return the columns of the progress line, unless `telemetry.progress` names others."""
    evaluated = [metric_name(name, figure) for name in config.held_out if not name for figure in config.figures[:1]]
    evaluated += [Metric.EVAL_SCORE.value] if config.sampler is not None and "" in config.held_out else []
    loss, *others = (f"{config.name}/{column}" for column in KINDS[config.name].columns)
    return (loss, *evaluated, *others, Metric.TOKENS_PER_S.value)


class Supervised(StepLoop):
    """The supervised loop, built by `assembly.py`. replicas: compares the copies of weights. answers: evaluations of generated
    answers, beside those of the loss; none without a section `rollout`."""

    def __init__(
        self,
        config: SupervisedConfig,
        run: Run,
        roles: Roles,
        data: SupervisedData,
        replicas: Extra,
        answers: Sequence[Evaluations] = (),
    ) -> None:
        super().__init__(run)
        self.config, self.roles, self.data, self.loader = config, roles, data, data.loader
        self.replicas, self.answers = replicas, answers
        self.kind: Kind[Any] = KINDS[config.name](config, roles)
        with self.instruments.timers().stage("logprobs"):
            self.kind.begin([data.train, *data.held_out.values()], self.log.note)

    @property
    def engine(self) -> Engine | None:
        """Engine of the role that learns; None on ranks where it does not live."""
        return self.roles.engines.get(self.config.learner)

    def run(self) -> None:
        if self.state.step == 0:
            self.evaluate(0, self.instruments.timers())
            self.log.end_of_start()
        super().run()

    def step(self) -> None:
        step = self.state.step + 1
        timers = self.instruments.timers(step)

        with timers.stage("prompts"):  # 1, of examples
            drawn = Drawn(self.data.train, self.loader.next_step())
            share = drawn.share(self.roles.shares[self.config.learner])

        with timers.stage("logprobs"):  # 4
            batch = self.kind.prepared(share, drawn)
            count = share.total(self.kind.count(batch))

        with timers.stage("update_policy"):  # 6
            self.checkpoints.begin_updates()
            update = self.roles.told(self.config.learner, self.update(share, batch, count))

        self.replicas.before_push(step, timers)

        self.instruments.settle_times(timers)  # 8
        self.state.count_examples(len(drawn.numbers), int(count), applied=update.taken.applied)
        held_out = self.evaluate(step, timers)
        self.log.step(self.metrics(share, drawn, update, count, timers), step, self.steps.total)
        is_last = step == self.steps.last
        self.stopped = self.checkpoints.end_of_step(step, is_last=is_last, evaluated=held_out)

    def update(self, share: Share, batch: PackedBatch, count: float) -> Update | None:
        """Take one optimizer step; None on ranks without the role that learns. Collective over its ranks."""
        engine = self.engine
        if engine is None:
            return None
        with engine.train_mode():
            engine.optimizer_zero_grad()
            result = engine.forward_backward(batch, self.kind.loss, denominator=max(count, 1.0), **self.how(share))
            lr = engine.lr_scheduler_step()
            return Update(replace(result, tokens={}), lr, engine.optimizer_step())

    def how(self, share: Share) -> dict[str, Any]:
        """Return further arguments of a pass: the fields that it reads, and the examples of several sequences."""
        reads = (*self.kind.reads, *getattr(self.kind.role, "sampling_fields", ()))
        return {"reads": reads, **({"together": share.together} if share.together else {})}

    def metrics(self, share: Share, drawn: Drawn, update: Update, count: float, timers: StageTimers) -> dict[str, float]:
        """Return metric -> value of a step. Collective over the world."""
        kind, router, lengths = self.config.name, update.result.router, drawn.sequence_lengths
        figures = self.kind.figures(update.result.sums, max(count, 1.0))
        experts = {} if router is None else expert_metrics("sft", router.tokens, router.balance_loss)
        return {
            **{f"{kind}/{figure}": value for figure, value in figures.items()},
            of_kind(Metric.SFT_GRAD_NORM, kind): update.taken.grad_norm,
            of_kind(Metric.SFT_LR, kind): update.lr,
            of_kind(Metric.SFT_SKIPPED, kind): float(not update.taken.applied),
            **{of_kind(name, kind): value for name, value in experts.items()},
            **{Metric.STAGE_SECONDS.of(f"{name}_s"): seconds for name, seconds in timers.seconds.items()},
            Metric.STEP_SECONDS.value: timers.total_s,
            Metric.TOKENS_PER_S.value: int(lengths.sum()) / timers.total_s,
            Metric.SAMPLES_PER_S.value: len(drawn.numbers) / timers.total_s,
            **self.instruments.costs_of_update("update_policy", self.config.learner, lengths, timers, self._shown(share)),
            **self.checkpoints.metrics(),
        }

    def _shown(self, share: Share) -> Tensor | None:
        """Return the tower's FLOPs (`tower_work`) of all examples, added up; None without images. Collective over the world with
        images."""
        mine = self.instruments.shown(self.config.learner, share.batch)
        return None if mine is None else total(mine.sum(0, keepdim=True) * share.reports)

    # -------------------------------------------------------------------------------------------------------- evaluation

    def evaluate(self, step: int, timers: StageTimers) -> dict[str, float]:
        """Pass over the held-out examples if they are due after `step`; return their metrics. Collective over the world."""
        trainer = self.config.trainer
        due = trainer.eval_before if step == 0 else self.steps.is_due(step, trainer.eval_every)
        if not due or not self.data.held_out:
            return {}
        found: dict[str, float] = {}
        with timers.stage("evaluate"):
            for name, examples in self.data.held_out.items():
                result = HeldOut(name, len(examples), self.figures_of(examples))
                self.log.evaluation(result, step)
                found |= result.metrics()
        results = [one for sets in self.answers for one in sets.after(step, timers)]
        return found | metrics_of([one for one in results if one.is_whole])  # by a few scores none is the best

    def figures_of(self, examples: Examples) -> dict[str, float]:
        """Return the figures of all these examples under the current weights. Collective over the world."""
        count, sums = 0.0, dict[str, float]()
        for drawn in Drawn.passes(examples, self.config.trainer.batch_size):
            share = drawn.share(self.roles.shares[self.config.learner])
            batch = self.kind.prepared(share, drawn)
            count += share.total(self.kind.count(batch))
            for name, value in self.roles.told(self.config.learner, self.sums_of(share, batch)).items():
                sums[name] = sums.get(name, 0.0) + value
        return self.kind.figures(sums, max(count, 1.0))

    def sums_of(self, share: Share, batch: PackedBatch) -> dict[str, float] | None:
        """Return the sums of the loss over all shares; None on ranks without the role that learns. Collective over its ranks."""
        engine = self.engine
        if engine is None:
            return None
        with engine.eval_mode():
            return engine.forward_backward(batch, self._without_loss, forward_only=True, **self.how(share)).sums

    def close(self) -> None:
        for sets in self.answers:
            sets.close()

    def _without_loss(self, output: Any, micro: PackedBatch) -> LossOutput:
        return replace(self.kind.loss(output, micro), loss_sum=None)
