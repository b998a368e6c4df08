"""Stage 1 of an asynchronous run: a step's prompts are drawn in the loader's order, before the step, and the responses to them
begin under weights that are at most `rollout.max_staleness` steps older than in a synchronous run. What began is never dropped."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from megappo.config.schema import TrainConfig
from megappo.data.ahead import AheadLoader
from megappo.data.prompts import Prompt
from megappo.rollout.half import CANARY, GREEDY, RolloutHalf
from megappo.rollout.types import Request, SamplingParams
from megappo.telemetry.metrics import Metric
from megappo.telemetry.runlog import RunLog
from megappo.trainer.build_roles import Roles
from megappo.trainer.experience.collect import canary_requests, collect, requests_of_step
from megappo.trainer.experience.experience import Experience
from megappo.trainer.extras import Extra
from megappo.trainer.left_out import REDRAWN
from megappo.trainer.model_outputs import add_model_outputs
from megappo.trainer.prompt_source import PromptSource
from megappo.trainer.sampler_check import compare_with_sampler, require_agreement, require_version
from megappo.trainer.step_record import StepRecord

IDLE_SHARE, IDLE_STEPS = 0.2, 10
"""Share of the time that a half may wait without a line about it, over so many steps."""
CANARY_SEQUENCES, CANARY_TOKENS = 4, 32
NO_SPREAD = "no spread"
"""Why samples were left out whose prompt dynamic sampling replaced."""


def canary_sampling(training: SamplingParams) -> SamplingParams:
    return replace(training, max_tokens=min(CANARY_TOKENS, training.max_tokens))


class Canary(Extra):
    """Judges the sampler by a few sequences that are drawn right after a push. A step that began earlier cannot serve: most of its
    tokens, or all, are of older weights. Prompts are the step's own, so that a cached prefix of older weights would be found.
    sampling: of training. limit: `rollout.max_prob_diff`."""

    def __init__(self, half: RolloutHalf, roles: Roles, device: torch.device, sampling: SamplingParams, limit: float) -> None:
        self._half, self._device, self._sampling, self._limit = half, device, sampling, limit
        self._roles = replace(roles, shares={"policy": roles.shares["policy"]})
        self._requests: Sequence[Request] = ()  # of this step

    def ask(self, prompts: Sequence[Prompt], rows: Sequence[int], seed: int, step: int) -> None:
        """Let them begin: at least one for each replica of the policy. rows: prompts of the step in the data."""
        count = max(CANARY_SEQUENCES, self._roles.shares["policy"].count)
        taken = [rows[place % len(rows)] for place in range(count)]
        self._requests = canary_requests(prompts, taken, seed, step)
        self._half.ask_beside(CANARY, step, taken)

    def before_updates(self, record: StepRecord) -> None:
        """Compare under the pushed weights. Collective over the world. SamplerMismatch on every rank."""
        requests, self._requests = self._requests, ()
        if not requests:
            return
        step, sampler = record.step, record.rollout.sampler
        recorded = {"with_top_k_ids": self._sampling.top_k_width > 0, "num_experts": self._sampling.record_experts}
        drawn = collect(requests, self._half.take(f"{CANARY}{step}"), **recorded)
        require_version(drawn.table, step, 1, sampler)
        found = compare_with_sampler(add_model_outputs(drawn.to(self._device), self._roles).batch, self._sampling)
        require_agreement(found, self._limit, step, sampler, which=f" of the sequences drawn after push {step - 1}")
        record.figures |= {Metric.CANARY_MEAN.value: found.mean, Metric.CANARY_MAX.value: found.max}


class AheadSource(PromptSource):
    """Source of an asynchronous run's requests, which the rollout half makes from the same rows. The first round of a step begins
    ahead, its others when they are drawn. total_steps: of the run."""

    def __init__(
        self,
        config: TrainConfig,
        prompts: Sequence[Prompt],
        loader: AheadLoader,
        total_steps: int,
        half: RolloutHalf,
        canary: Canary,
    ) -> None:
        super().__init__(prompts, loader, loader.n, config.run.seed, config.algorithm.dynamic_sampling)
        self._ahead, self._half, self._canary, self._total_steps = loader, half, canary, total_steps
        self._is_compared = config.algorithm.estimator.type == "remax"

    def draw(self, step: int, num_rows: int, num_before: int) -> tuple[Sequence[int], Sequence[Request]]:
        if num_before:
            rows, requests = super().draw(step, num_rows, num_before)
            self._half.ask_refill(step, rows, num_before)
        else:
            rows, requests = self._draw_first(step)
        if self._is_compared:
            self._half.ask_beside(GREEDY, step, rows)
        return rows, requests

    def _draw_first(self, step: int) -> tuple[Sequence[int], Sequence[Request]]:
        if (begun := self._ahead.rows.get(step)) is not None:  # else the newest weights draw all of it, and it is judged itself
            self._canary.ask(self.prompts, begun, self.seed, step)
        for one, rows in self._ahead.admit(step, self._total_steps).items():
            self._half.ask(one, rows)
        rows = self._ahead.rows.pop(step)
        return rows, requests_of_step(self.prompts, rows, self.samples_per_row, self.seed, step)

    def end(self, experience: Experience) -> dict[str, float]:
        return self._half.figures()


class Accounts(Extra):
    """Counts what became of the samples, and says so on the console when a half waits for the other."""

    def __init__(self, loader: AheadLoader, log: RunLog) -> None:
        self._loader, self._log = loader, log
        self._began, self._steps, self._said = time.monotonic(), 0, ""
        self._waited: dict[str, float] = {}

    def after_log(self, record: StepRecord) -> None:
        left_out, rounds, table = record.rollout.left_out, record.rollout.rounds, record.experience.table
        if rounds is not None:
            self._loader.left_out[NO_SPREAD] += rounds.prompts_replaced * self._loader.n
        self._loader.left_out[REDRAWN] += record.rollout.redrawn
        if left_out is not None:
            table = left_out.experience.table.rows(left_out.numbers)
            self._loader.left_out.update(left_out.counts)
        self._loader.trained += int(table.ends.sum())
        self._steps += 1
        for name in (Metric.WAITED, Metric.ROLLOUT_IDLE):
            self._waited[name.value] = self._waited.get(name.value, 0.0) + record.rollout.figures.get(name.value, 0.0)
        if self._steps == IDLE_STEPS:
            self._tell(time.monotonic() - self._began)
            self._began, self._steps, self._waited = time.monotonic(), 0, {}

    def _tell(self, seconds: float) -> None:
        training, rollout = (self._waited[name.value] / seconds for name in (Metric.WAITED, Metric.ROLLOUT_IDLE))
        half = "training" if training > max(rollout, IDLE_SHARE) else "rollout" if rollout > IDLE_SHARE else ""
        if half != self._said and half:
            # With both waiting in turn more steps in flight help; with one the other is slower.
            fix = f"move ranks {'to' if half == 'training' else 'from'} rollout.ranks"
            fix = "raise rollout.max_staleness" if min(training, rollout) > IDLE_SHARE else fix
            self._log.note(f"the {half} half waits {max(training, rollout):.0%} of the time for the other: {fix}")
        self._said = half
