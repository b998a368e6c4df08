"""Turns in the report of a step and of an evaluation: how many there were, what ended them, and the time of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megappo.algo.summaries import Moments, masked_moments
from megappo.rollout.types import Played
from megappo.trainer.step_totals import Totals


def moments_of_turns(played: Sequence[Played]) -> dict[str, Moments]:
    """Name -> moments over the trajectories that this rank drew in an environment, or over its calls there."""
    columns = {
        "turns": [one.turns for one in played],
        "turns limited": [one.reached_limit for one in played],
        "turns late": [one.is_late for one in played],
        "turn seconds": [seconds for one in played for seconds in one.seconds],
    }
    values: dict[str, Tensor] = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    return {name: masked_moments(x, torch.ones(x.shape, dtype=torch.bool)) for name, x in values.items()}


class Answers(NamedTuple):
    """Seconds of the calls of the environment: of a mean and of the slowest one, and of all ranks and workers together."""

    mean_s: float
    max_s: float
    total_s: float


class Turns(NamedTuple):
    """Turns of the trajectories of all ranks: their mean and largest number, the shares that `max_turns` and a late answer ended.
    answers: None if the environment was never asked."""

    mean: float
    max: float
    limited: float
    late: float
    answers: Answers | None

    @classmethod
    def of(cls, totals: Totals) -> Turns | None:
        """None without an environment. totals: with `moments_of_turns`."""
        if not float(totals["turns"][0]):
            return None
        turns, answers = totals.summary("turns"), None
        if float(totals["turn seconds"][0]):
            calls = totals.summary("turn seconds")
            answers = Answers(calls.mean, calls.max, float(totals["turn seconds"][1]))
        return cls(turns.mean, turns.max, totals.mean("turns limited"), totals.mean("turns late"), answers)
