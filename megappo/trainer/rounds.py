"""Rounds of stages 1 to 3 that draw a step's samples, and their result. Without dynamic sampling there is one round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megappo.algo.groups import are_equal
from megappo.config.prompt_sections import DynamicSamplingConfig
from megappo.data.packing import PackedBatch, joined
from megappo.data.prompts import Prompt
from megappo.data.tokenizers import Tokenizer
from megappo.rewards import compose
from megappo.rewards.compose import Scored
from megappo.rewards.scorer import Scorer
from megappo.rollout.types import Played, Request, RolloutEngine, SamplingParams
from megappo.telemetry.metrics import Metric
from megappo.trainer.experience.collect import prompt_of_sample
from megappo.trainer.experience.experience import Experience
from megappo.trainer.experience.table import Owners, SampleTable
from megappo.trainer.left_out import LeftOut


class Sampler(NamedTuple):
    """Engine that draws the responses of a run, with its parameters, and the scorer."""

    engine: RolloutEngine
    params: SamplingParams
    tokenizer: Tokenizer
    scorer: Scorer


@dataclass(frozen=True)
class Round:
    """Prompts of a round and the requests of their samples, `len(requests) / len(rows)` each. rows: of the prompts in the data.
    is_first: the first round of its step."""

    step: int
    rows: Sequence[int]
    requests: Sequence[Request]
    prompts: Sequence[Prompt]
    is_first: bool = True

    def prompt_of(self, sample: int) -> Prompt:
        """Return the prompt of a sample of this round."""
        return prompt_of_sample(self.prompts, self.rows, len(self.requests) // len(self.rows), sample)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Scored samples of a step for the training side.
    experience, scored: of this rank's samples. prompt_of: number of a sample in the step, before any were left out -> prompt.
    sampler: name of the engine that drew them. nothing_to_learn: reason why no model can be updated, or empty. figures: by metric.
    rounds: None without dynamic sampling. played: trajectories that this rank drew in an environment. left_out: samples without a
    score; None if all have one. redrawn: trajectories that were drawn before because too many of them had none."""

    step: int
    experience: Experience
    scored: Scored
    prompt_of: Callable[[int], Prompt]
    sampler: str = ""
    nothing_to_learn: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    rounds: Rounds | None = None
    played: Sequence[Played] = ()
    left_out: LeftOut | None = None
    redrawn: int = 0


@dataclass(frozen=True)
class Rounds:
    """Figures of a step's rounds. prompts: all drawn. equal_left: prompts with equal scores that are trained on anyway.
    length, sampled: [M] int32, tokens of the replaced samples and of their responses."""

    count: int
    prompts: int
    prompts_replaced: int
    equal_left: int
    length: Tensor
    sampled: Tensor

    def metrics(self) -> dict[str, float]:
        return {
            Metric.ROUNDS.value: self.count,
            Metric.PROMPTS_DRAWN.value: self.prompts,
            Metric.PROMPTS_REPLACED.value: self.prompts_replaced,
            Metric.EQUAL_LEFT.value: self.equal_left,
            Metric.TOKENS_REPLACED.value: int(self.sampled.sum()),
        }


@dataclass(frozen=True)
class _Kept:
    """Samples of a round that the step trains on. numbers: [K] int64, in the step. share: [K], owners. own: [B], numbers on this
    rank."""

    numbers: Tensor
    table: SampleTable
    share: Tensor
    own: Tensor
    batch: PackedBatch
    scored: Scored


class StepSamples:
    """Samples of one step, collected over its rounds. rows: prompt of each place. played: of all rounds, as in a `Rollout`.
    times_redrawn: how often all places were opened again.
    open: int64, places to draw a prompt for in the next round; empty once the step is complete.

    With `algorithm.dynamic_sampling`, prompts whose responses all score the same are replaced (DAPO, Yu et al. 2025,
    arXiv:2503.14476, section 3.2). Each prompt has a place 0..P-1 with samples `place * n .. place * n + n - 1`; a place stays open
    while its responses score alike. Every rank decides from the scores of all, and samples stay on the rank that scored them.
    """

    def __init__(self, settings: DynamicSamplingConfig | None, num_prompts: int, n: int) -> None:
        self._settings, self._n = settings, n
        self.rows = [-1] * num_prompts
        self.played: list[Played] = []
        self.open = torch.arange(num_prompts)
        self._rounds = self._prompts = self._equal_left = self.times_redrawn = 0
        self._like: Experience
        self._whole: tuple[Experience, Scored] | None = None
        self._kept: list[_Kept] = []
        self._replaced: list[SampleTable] = []

    @property
    def num_open(self) -> int:
        return len(self.open)

    @property
    def num_drawn(self) -> int:
        """Samples of the rounds so far; the next sample has this number, for its seed."""
        return self._prompts * self._n

    def draw_again(self) -> None:
        """Forget what was drawn and open all places for other prompts."""
        self.open, self._whole, self._rounds = torch.arange(len(self.rows)), None, 0
        self._replaced += [one.table for one in self._kept]
        self._kept, self.times_redrawn = [], self.times_redrawn + 1

    @property
    def num_redrawn(self) -> int:
        """Samples that were drawn in vain."""
        return self.times_redrawn * len(self.rows) * self._n

    def add(self, rows: Sequence[int], experience: Experience, scored: Scored) -> None:
        """Add a round: one row per open place, and the samples of these prompts in order. Collective over the world.
        ValueError if dynamic sampling meets trajectories of several sequences."""
        self._rounds, self._prompts = self._rounds + 1, self._prompts + len(rows)
        for place, row in zip(self.open.tolist(), rows, strict=True):
            self.rows[place] = row
        if self._settings is None:
            self._finish(experience, scored)
            return
        if experience.table.has_chains:
            raise ValueError("algorithm.dynamic_sampling: trajectories of several sequences cannot be replaced; set it to null")
        equal = are_equal(experience.column(self._compared(scored)), experience.table.group)
        is_last = self._rounds == self._settings.max_rounds
        self._equal_left = int(equal.sum()) if is_last else 0
        chosen = torch.ones_like(equal) if is_last else ~equal
        self._keep(experience, scored, chosen)
        self.open = self.open[~chosen]
        if self._rounds == 1 and not self.num_open:
            self._finish(experience, scored)

    def result(self) -> tuple[Experience, Scored]:
        """Return the experience of the whole step, and the scores of this rank's samples in the order of its batch."""
        assert not self.num_open, f"{self.num_open} prompts are missing"
        if self._whole is None:
            self._whole = self._merged()
        return self._whole

    def _finish(self, experience: Experience, scored: Scored) -> None:
        self.open, self._whole = self.open[:0], (experience, scored)

    def _merged(self) -> tuple[Experience, Scored]:
        """Join the kept samples of all rounds under their numbers in the step, each where it was scored."""
        order = torch.cat([one.numbers for one in self._kept]).argsort()
        columns = {
            column.name: torch.cat([getattr(one.table, column.name) for one in self._kept])[order] for column in fields(SampleTable)
        }
        columns["group"] = (torch.arange(len(order)) // self._n).int()
        own = torch.cat([one.own for one in self._kept]).argsort()
        experience = replace(
            self._like,
            table=SampleTable(**columns),
            owners=Owners(torch.cat([one.share for one in self._kept])[order], self._like.owners.shares),
            batch=joined([one.batch for one in self._kept]).select(own),
        )
        return experience, compose.joined([one.scored for one in self._kept]).select(own.tolist())

    def rounds(self) -> Rounds | None:
        """Return the figures of the rounds; None without dynamic sampling."""
        if self._settings is None:
            return None
        length, sampled = (
            torch.cat([torch.empty(0, dtype=torch.int32), *(getattr(one, name) for one in self._replaced)])
            for name in ("length", "sampled")
        )
        replaced = self._prompts - len(self.rows) * (1 + self.times_redrawn)
        return Rounds(self._rounds, self._prompts, replaced, self._equal_left, length, sampled)

    def _compared(self, scored: Scored) -> Tensor:
        """Return [B] fp64, the part of the reward that is compared, or the score of a sample without it."""
        total = torch.tensor(scored.total, dtype=torch.float64)
        metric = None if self._settings is None else self._settings.metric
        if metric is None:
            return total
        part = torch.tensor(scored.parts[metric], dtype=torch.float64)
        # A sample without a score is compared by no part, as it is not trained on either.
        return torch.where(part.isnan() | total.isnan(), total, part)

    def _keep(self, experience: Experience, scored: Scored, chosen: Tensor) -> None:
        """Keep the samples of the chosen places, [places of this round] bool, and note the others as replaced."""
        self._like = experience
        sample = torch.arange(experience.table.num_samples)
        is_kept = chosen[sample // self._n]
        self._replaced.append(experience.table.rows(sample[~is_kept]))
        kept, mine = sample[is_kept], is_kept[experience.numbers].nonzero().flatten()

        def number_in_step(numbers: Tensor) -> Tensor:
            return self.open[numbers // self._n] * self._n + numbers % self._n

        own = number_in_step(experience.numbers[mine])
        batch, share = experience.batch.select(mine), experience.owners.share[kept]
        table = experience.table.rows(kept)
        self._kept.append(_Kept(number_in_step(kept), table, share, own, batch, scored.select(mine.tolist())))


def nothing_to_learn(table: SampleTable, left_out: LeftOut | None) -> str:
    """Return why no model can be updated on a step's responses, equal on all ranks; empty if one can. table: of all samples."""
    if left_out is not None and not len(left_out.numbers):
        return left_out.describe()
    return "" if int(table.sampled.sum()) else f"none of the {table.num_samples} responses has a sampled token"
