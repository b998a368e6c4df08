"""Stage 1 of an asynchronous run: a step's prompts are drawn in the loader's order, before the step, and the responses to them
begin under weights that are at most `rollout.max_staleness` steps older than in a synchronous run. What began is never dropped."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megappo.data.loader import PromptLoader
from megappo.data.prompts import Prompt
from megappo.rollout.half import CANARY, RolloutHalf
from megappo.rollout.types import Request, SamplingParams
from megappo.telemetry.metrics import Metric
from megappo.telemetry.runlog import RunLog
from megappo.trainer.build_roles import Roles
from megappo.trainer.experience.collect import canary_requests, collect, requests_of_step
from megappo.trainer.experience.experience import Experience
from megappo.trainer.extras import Extra
from megappo.trainer.model_outputs import add_model_outputs
from megappo.trainer.prompt_source import PromptSource
from megappo.trainer.report import StepRecord
from megappo.trainer.sampler_check import compare_with_sampler, require_agreement, require_version

IDLE_SHARE, IDLE_STEPS = 0.2, 10
"""Share of the time that a half may wait without a line about it, over so many steps."""
CANARY_SEQUENCES, CANARY_TOKENS = 4, 32


class AheadLoader(PromptLoader):
    """A run's loader whose cursor is ahead of the steps. rows: step -> prompts of steps that have begun and were not trained on.
    n: samples per prompt. asked, trained, left_out: samples of the run so far, for the ledger."""

    def __init__(self, loader: PromptLoader, staleness: int, n: int, total_steps: int) -> None:
        vars(self).update(vars(loader))
        self._staleness, self.n, self._total_steps = staleness, n, total_steps
        self.rows: dict[int, list[int]] = {}
        self.asked, self.trained, self.left_out = 0, 0, Counter[str]()

    def admit(self, step: int) -> dict[int, list[int]]:
        """Draw the prompts of the steps that may begin now that `step` is next; return step -> rows of those that are new."""
        last = min(step + self._staleness, self._total_steps)
        new = {one: self.next_step() for one in range(max(self.rows, default=step - 1) + 1, last + 1)}
        self.rows |= new
        self.asked += self.n * sum(map(len, new.values()))
        return new

    def ledger(self) -> str:
        """Return a line that accounts for every sample of the run. RuntimeError if one is lost or was trained on twice."""
        in_flight, left = self.n * sum(map(len, self.rows.values())), self.left_out.total()
        reasons = f" ({', '.join(f'{count} {reason}' for reason, count in sorted(self.left_out.items()))})" if left else ""
        found = f"{self.trained:,} trained on + {left:,} left out{reasons} + {in_flight:,} in flight"
        if self.asked != self.trained + left + in_flight:
            raise RuntimeError(f"samples were lost or trained on twice: {self.asked:,} asked for, {found}")
        return f"samples: {self.asked:,} asked for = {found}"

    def state_dict(self) -> dict[str, Any]:
        rows = {str(step): rows for step, rows in self.rows.items()}
        ledger = {"asked": self.asked, "trained": self.trained, "left_out": dict(self.left_out)}
        return {**super().state_dict(), "ahead": {"n": self.n, "rows": rows}, "ledger": ledger}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `PromptLoader.load_state_dict`; the numbers of prompts and samples may change only while nothing is in flight, and
        `rollout.max_staleness` may not be less than what is."""
        ahead, ledger = state.get("ahead", {"n": self.n, "rows": {}}), state.get("ledger", {})
        rows = {int(step): rows for step, rows in ahead["rows"].items()}
        if len(rows) > self._staleness:
            raise ValueError(
                f"cannot resume: rollout.max_staleness = {self._staleness}, and the responses of {len(rows)} steps have begun; "
                f"set it to {len(rows)}"
            )
        if rows and (ahead["n"] != self.n or any(len(one) != self.prompts_per_step for one in rows.values())):
            key = "data.prompts_per_step" if ahead["n"] == self.n else "rollout.samples_per_prompt"
            raise ValueError(f"cannot resume: {key} changed, and the responses of {len(rows)} steps have begun; restore it")
        super().load_state_dict({name: value for name, value in state.items() if name != "ahead"})
        self.rows = rows
        self.asked, self.trained = ledger.get("asked", 0), ledger.get("trained", 0)
        self.left_out = Counter(ledger.get("left_out", {}))


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
        self._half.ask_canary(step, taken)

    def before_updates(self, record: StepRecord) -> None:
        """Compare under the pushed weights. Collective over the world. SamplerMismatch on every rank."""
        requests, self._requests = self._requests, ()
        if not requests:
            return
        step, sampler = record.step, record.rollout.sampler
        drawn = collect(requests, self._half.take(f"{CANARY}{step}"), with_top_k_ids=self._sampling.top_k_width > 0)
        require_version(drawn.table, step, 1, sampler)
        found = compare_with_sampler(add_model_outputs(drawn.to(self._device), self._roles).batch, self._sampling)
        require_agreement(found, self._limit, step, sampler, which=f" of the sequences drawn after push {step - 1}")
        record.figures |= {Metric.CANARY_MEAN.value: found.mean, Metric.CANARY_MAX.value: found.max}


class AheadSource(PromptSource):
    """Source of an asynchronous run's requests, which the rollout half makes from the same rows."""

    def __init__(self, prompts: Sequence[Prompt], loader: AheadLoader, seed: int, half: RolloutHalf, canary: Canary) -> None:
        super().__init__(prompts, loader, loader.n, seed)
        self._ahead, self._half, self._canary = loader, half, canary

    def draw(self, step: int, num_rows: int, num_before: int) -> tuple[Sequence[int], Sequence[Request]]:
        if (begun := self._ahead.rows.get(step)) is not None:  # else the newest weights draw all of it, and it is judged itself
            self._canary.ask(self.prompts, begun, self.seed, step)
        for one, rows in self._ahead.admit(step).items():
            self._half.ask(one, rows)
        rows = self._ahead.rows.pop(step)
        return rows, requests_of_step(self.prompts, rows, self.samples_per_row, self.seed, step)

    def end(self, experience: Experience) -> dict[str, float]:
        return dict(self._half.figures)


class Accounts(Extra):
    """Counts what became of the samples, and says so on the console when a half waits for the other."""

    def __init__(self, loader: AheadLoader, log: RunLog) -> None:
        self._loader, self._log = loader, log
        self._began, self._steps, self._said = time.monotonic(), 0, ""
        self._waited: dict[str, float] = {}

    def after_log(self, record: StepRecord) -> None:
        left_out, table = record.rollout.left_out, record.experience.table
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
