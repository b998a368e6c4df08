"""Stage 1: the prompts of a step's rounds, the requests of their samples, and each prompt's past response lengths and pass rates.
`partial_rollouts.py` has the source of responses over several steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from megappo.config.prompt_sections import DynamicSamplingConfig
from megappo.data.loader import PromptLoader
from megappo.data.prompts import Prompt
from megappo.rewards.compose import Scored
from megappo.rollout.types import Request
from megappo.telemetry.metrics import Metric
from megappo.trainer.experience.collect import requests_of_step
from megappo.trainer.experience.experience import Experience
from megappo.trainer.experience.table import SampleTable
from megappo.trainer.rounds import StepSamples

MOST_PROMPTS = 1 << 18  # 2 MiB a rank; data with more prompts are hardly visited twice


class PromptSource:
    """Source of a run's requests. n: samples per prompt. seed: of the run. rounds: settings of a step's rounds; None for a single
    round. samples_per_row: samples of each row that `draw` returns. rows_per_step: rows of a step."""

    def __init__(
        self, prompts: Sequence[Prompt], loader: PromptLoader, n: int, seed: int, rounds: DynamicSamplingConfig | None = None
    ) -> None:
        self.prompts, self.loader, self.seed = prompts, loader, seed
        self._rounds = rounds
        self.samples_per_row, self.rows_per_step = n, loader.prompts_per_step
        self._lengths = ResponseLengths(len(prompts))

    def begin_step(self) -> StepSamples:
        return StepSamples(self._rounds, self.rows_per_step, self.samples_per_row)

    def draw(self, step: int, num_rows: int, num_before: int) -> tuple[Sequence[int], Sequence[Request]]:
        """Return rows of prompts and the requests of their samples. Advances the loader's cursor, identically on every rank.
        num_before: samples that the step drew in earlier rounds."""
        rows = self.loader.next_step(num_rows)
        return rows, requests_of_step(self.prompts, rows, self.samples_per_row, self.seed, step, num_before)

    def predicted_lengths(self, rows: Sequence[int]) -> list[float] | None:
        """Predict the lengths of the responses to these prompts, as `ResponseLengths.predict`."""
        return self._lengths.predict(rows, self.samples_per_row)

    def observe(self, rows: Sequence[int], experience: Experience, scored: Scored) -> None:
        """Record a round's responses, the same number for each of these prompts. Collective over the world, with pass rates."""
        self._lengths.observe(rows, experience.table)
        if self.loader.pass_rates is not None:
            count = experience.table.num_trajectories  # behind them come the sequences that trajectories went on from
            scores = experience.column(torch.tensor(scored.total, dtype=torch.float64))[:count].view(len(rows), -1)
            ends = experience.table.ends[:count].view(len(rows), -1)  # those that go on are counted when they end
            self.loader.pass_rates.observe(rows, [found[ended & ~found.isnan()].tolist() for found, ended in zip(scores, ends)])

    def end(self, experience: Experience) -> dict[str, float]:
        """Process the samples of a whole step; return metric -> value. Collective over the world."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Return the figures of the pass rates so far; empty without pass rates."""
        rates = self.loader.pass_rates
        return {} if rates is None else {Metric.PROMPTS_SEEN.value: rates.num_seen, Metric.PROMPTS_SKIPPED.value: rates.skipped}


class ResponseLengths:
    """Mean tokens of the last responses to each prompt, by its row in the data; equal on all ranks, like the table.
    Not saved in checkpoints: it decides who draws a response and when, but not its content."""

    def __init__(self, num_prompts: int) -> None:
        self._size = min(num_prompts, MOST_PROMPTS)
        # A hash table without collision handling, so memory is bounded: of prompts that share an entry, the last one seen is kept.
        self._prompt = numpy.zeros(self._size, numpy.int32)  # its row + 1
        self._mean = numpy.zeros(self._size, numpy.float32)

    def observe(self, rows: Sequence[int], table: SampleTable) -> None:
        """Record a round's responses; samples of group i answer the prompt of `rows[i]`."""
        of_prompt = table.group >= 0
        group, tokens = table.group[of_prompt].long(), table.response[of_prompt].double()
        count = torch.bincount(group, minlength=len(rows))
        mean = torch.bincount(group, tokens, minlength=len(rows)) / count
        answered = (count > 0).numpy()
        seen = numpy.asarray(rows)[answered]
        self._prompt[seen % self._size] = seen + 1
        self._mean[seen % self._size] = mean.numpy()[answered]

    def predict(self, rows: Sequence[int], samples_per_prompt: int) -> list[float] | None:
        """Return the lengths [rows * samples_per_prompt] of the responses to these prompts; None if none of the prompts was seen.
        A prompt not seen before gets the mean of the round's others."""
        asked = numpy.asarray(rows)
        mean, seen = self._mean[asked % self._size], self._prompt[asked % self._size] == asked + 1
        if not seen.any():
            return None
        return numpy.where(seen, mean, mean[seen].mean()).repeat(samples_per_prompt).tolist()
