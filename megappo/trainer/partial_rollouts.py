"""Responses drawn over several steps, a window of tokens in each (T-PPO, Fan et al. 2025, arXiv:2506.15050). Unfinished responses
come first in a step, in order, then new ones fill it up. They are the same on every rank and part of the trainer's state."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray

from megappo.config.errors import ConfigError, problem
from megappo.config.schema import TrainConfig
from megappo.data.loader import PromptLoader
from megappo.data.prompts import Prompt
from megappo.parallel.totals import total
from megappo.rollout.snapshot import packed, unpacked
from megappo.rollout.types import Request, Segment
from megappo.telemetry.metrics import Metric
from megappo.telemetry.runlog import RunLog
from megappo.trainer.experience.collect import sample_seed
from megappo.trainer.experience.experience import Experience
from megappo.trainer.prompt_source import PromptSource
from megappo.trainer.state import TrainerState


@dataclass(frozen=True)
class Begun:
    """An unfinished response. row: of its prompt. segments: drawn so far, one per step."""

    row: int
    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)


class Unfinished(NamedTuple):
    """Responses that a step leaves to the next, in order. row, left: the prompt with responses to begin, and their number."""

    begun: tuple[Begun, ...] = ()
    row: int = -1
    left: int = 0

    def encoded(self) -> str:
        """Return text for the trainer's state."""
        content = packed(([(one.row, one.segments) for one in self.begun], self.row, self.left))
        return base64.b64encode(zlib.compress(content, 1)).decode()

    @classmethod
    def decoded(cls, state: str | None) -> Unfinished:
        """Read the state of `encoded`; None is the start of a run."""
        if state is None:
            return cls()
        begun, row, left = unpacked(zlib.decompress(base64.b64decode(state)))
        return cls(tuple(Begun(*one) for one in begun), row, left)


class PartialRollouts(PromptSource):
    """Source of a run with `rollout.partial_rollout_tokens`. Each row is one sample: the samples of a prompt end in different
    steps."""

    def __init__(self, config: TrainConfig, prompts: Sequence[Prompt], loader: PromptLoader, state: TrainerState) -> None:
        assert config.rollout.partial_rollout_tokens is not None
        super().__init__(prompts, loader, 1, config.run.seed)
        self._window, self._longest = config.rollout.partial_rollout_tokens, config.rollout.max_response_tokens
        self._n, self._state = config.rollout.samples_per_prompt, state
        self.num_samples = self.rows_per_step = config.data.prompts_per_step * self._n
        self._known: tuple[str | None, Unfinished] = (None, Unfinished())
        self._begun: list[Begun] = []
        self._waiting: tuple[Begun, ...] = ()
        self._num_prompts, self._open = 0, (-1, 0)

    @property
    def unfinished(self) -> Unfinished:
        if self._known[0] is not self._state.unfinished:  # a resume replaced it
            self._known = self._state.unfinished, Unfinished.decoded(self._state.unfinished)
        return self._known[1]

    def draw(self, step: int, num_rows: int = 0, num_before: int = 0) -> tuple[list[int], list[Request]]:
        """Return the prompt row of every sample of the step, and the requests; a step has one round."""
        left = self.unfinished
        # There are more than a step's samples only after a resume with a smaller step: the rest waits.
        going_on, self._waiting = left.begun[: self.num_samples], left.begun[self.num_samples :]
        self._begun = [*going_on, *(Begun(row, ()) for row in self._new_rows(left, self.num_samples - len(going_on)))]
        requests = [self._request(number, one, step) for number, one in enumerate(self._begun)]
        return [one.row for one in self._begun], requests

    def predicted_lengths(self, rows: Sequence[int]) -> None:
        """Return None: the window limits all responses alike."""

    def end(self, experience: Experience) -> dict[str, float]:
        """Store the responses that continue in the next step; return the step's figures. Collective over the world."""
        table = experience.table
        numbers = table.unfinished.nonzero().flatten()
        tokens, logprobs = _of_all_ranks(experience, numbers)
        versions = table.newest[numbers].tolist()
        last = [Segment(*one) for one in zip(tokens, logprobs, versions)]
        drawn = dict(zip(numbers.tolist(), last))
        figures = self._figures(experience, drawn)
        going_on = [Begun(self._begun[i].row, (*self._begun[i].segments, segment)) for i, segment in drawn.items()]
        unfinished = Unfinished((*self._waiting, *going_on), *self._open)
        self._state.unfinished = unfinished.encoded()
        self._known = self._state.unfinished, unfinished
        return figures

    def _new_rows(self, left: Unfinished, count: int) -> list[int]:
        """Return the prompt rows of `count` new samples, first those that the step before could not begin."""
        rows = [left.row] * min(left.left, count)
        still_open = left.left - len(rows)
        missing = count - len(rows)
        # A prompt leaves the loader when its first response begins, so the loader's cursor counts it once.
        fresh = self.loader.next_step(-(-missing // self._n)) if missing else []
        self._num_prompts = len(fresh)
        rows += [row for row in fresh for _ in range(self._n)][:missing]
        if fresh:
            still_open = len(fresh) * self._n - missing
        self._open = (rows[-1] if fresh else left.row, still_open) if still_open else (-1, 0)
        return rows

    def _request(self, number: int, one: Begun, step: int) -> Request:
        room = self._longest - one.num_tokens
        limit = min(self._window, room)
        return Request(
            number,
            self.prompts[one.row].tokens,
            sample_seed(self.seed, step, number),
            before=one.segments,
            max_tokens=limit,
            goes_on=limit < room,
        )

    def _figures(self, experience: Experience, going_on: Mapping[int, Segment]) -> dict[str, float]:
        table, step = experience.table, self._state.step + 1
        windows = torch.tensor([len(one.segments) + 1 for one in self._begun])[table.ends].double()
        earlier = [(step - 1 - s.version, len(s.tokens)) for one in self._begun for s in one.segments]
        now = zip(table.ages(step).tolist(), table.sampled.tolist())
        ages, counts = torch.tensor([*earlier, *now], dtype=torch.float64).unbind(1)
        return {
            Metric.GOING_ON.value: sum(1 for one in self._begun if one.segments) / len(self._begun),
            Metric.UNFINISHED.value: len(going_on) / len(self._begun),
            Metric.PROMPTS_BEGUN.value: self._num_prompts,
            Metric.WINDOWS_MEAN.value: float(windows.mean()) if len(windows) else math.nan,
            Metric.WINDOWS_MAX.value: int(windows.max()) if len(windows) else 0,
            Metric.TOKEN_AGE_MEAN.value: float((ages * counts).sum() / counts.sum().clamp(min=1.0)),
            Metric.TOKEN_AGE_MAX.value: int(ages[counts > 0].max()) if bool((counts > 0).any()) else 0,
        }


def prompt_source_of(config: TrainConfig, prompts: Sequence[Prompt], loader: PromptLoader, state: TrainerState) -> PromptSource:
    if config.rollout.partial_rollout_tokens is not None:
        return PartialRollouts(config, prompts, loader, state)
    return PromptSource(prompts, loader, config.rollout.samples_per_prompt, config.run.seed, config.algorithm.dynamic_sampling)


def resume_partial_rollouts(config: TrainConfig, state: TrainerState, log: RunLog) -> None:
    """Check a checkpoint's unfinished responses against the configuration; drop them, with a note, without partial rollouts.
    ConfigError on every rank if an unfinished response already has `rollout.max_response_tokens` or more."""
    begun = Unfinished.decoded(state.unfinished).begun
    longest = max((one.num_tokens for one in begun), default=0)
    if config.rollout.partial_rollout_tokens is None:
        if begun:
            log.note(
                f"rollout.partial_rollout_tokens is null: {len(begun)} responses that the checkpoint left unfinished are dropped"
            )
        state.unfinished = None
    elif longest >= config.rollout.max_response_tokens:
        fix = f"the checkpoint has an unfinished response of {longest} tokens; use at least {longest + 1}"
        raise ConfigError(problem("rollout.max_response_tokens", config.rollout.max_response_tokens, fix))


def _of_all_ranks(experience: Experience, numbers: torch.Tensor) -> tuple[list[NDArray], list[NDArray]]:
    """Gather this step's tokens (int32) and log-probs (float32) of these samples from all ranks. Collective over the world."""
    batch, counts = experience.batch, experience.table.sampled[numbers].long()
    mine = torch.isin(numbers, experience.numbers)
    places = torch.searchsorted(experience.numbers, numbers[mine])
    own = batch.select(places)
    sampled = own["response_mask"]
    here = mine.repeat_interleave(counts, output_size=int(counts.sum()))
    tokens = torch.zeros(here.shape, dtype=torch.int32)
    logprobs = torch.zeros(here.shape, dtype=torch.float32)
    tokens[here], logprobs[here] = own.tokens[sampled].int(), own["rollout_logprob"][sampled]
    # Each element is written by one rank, so the sum is exact.
    ends = counts.cumsum(0)[:-1].tolist()
    return numpy.split(total(tokens).numpy(), ends), numpy.split(total(logprobs).numpy(), ends)
