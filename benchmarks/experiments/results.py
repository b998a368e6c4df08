"""Results of the runs: what docs/experiments.json keeps of each, and what the tables say of the seeds together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiments.arms import ARMS
from benchmarks.experiments.runs import directory, is_finished
from benchmarks.experiments.tasks import TASKS
from megappo.commands.compare.curves import Curve, curve_of
from megappo.commands.runs.read import Rows, read_rows
from megappo.telemetry.metrics import Metric

REWARD, EXPLAINED = Metric.SCORE_MEAN.value, Metric.CRITIC_EXPLAINED_VARIANCE.value
SMOOTHED = 3  # steps, of the mean reward that is to reach the goal
LAST = 5  # steps, of the reward and the explained variance at the end
DIGITS = 4

Results = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
"""Task -> arm -> seed -> {reward, explained: step by step; held_out}."""


def read_results(folder: Path, seeds: Sequence[int], known: Results | None = None) -> dict[str, Any]:
    """Read the finished runs. known: results that stay where the folder has none."""
    found: dict[str, Any] = {task: {arm: dict(of_seeds) for arm, of_seeds in arms.items()} for task, arms in (known or {}).items()}
    for task in TASKS:
        for arm in ARMS:
            for seed in seeds:
                if is_finished(run_dir := directory(folder, task, arm, seed)):
                    found.setdefault(task, {}).setdefault(arm, {})[str(seed)] = record_of(read_rows(run_dir))
    return found


def record_of(rows: Rows) -> dict[str, Any]:
    curves = {"reward": curve_of(rows, REWARD), "explained": curve_of(rows, EXPLAINED)}
    kept = {name: [None if value is None else round(value, DIGITS) for value in curve.values()] for name, curve in curves.items()}
    return {**kept, "held_out": rows[max(rows)][Metric.EVAL_SCORE.value]}


def curve(record: Mapping[str, Any], name: str) -> Curve:
    return dict(enumerate(record[name], 1))


@dataclass(frozen=True)
class Spread:
    """Numbers of the seeds; inf where a goal was never reached."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        return cls(tuple(values))

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def against(self, other: Spread) -> str:
        """`higher`, `lower`, or `within` where the ranges overlap: nothing is said then."""
        return "higher" if self.low > other.high else "lower" if self.high < other.low else "within"

    def text(self, digits: int) -> str:
        """Mean and range; of a goal that some seeds did not reach, how many did, and their range."""
        reached = [value for value in self.values if math.isfinite(value)]
        if not reached:
            return "never"
        low, high = (f"{value:.{digits}f}" for value in (min(reached), max(reached)))
        if len(reached) < len(self.values):
            return f"{len(reached)} of {len(self.values)}: {low}" + (f"..{high}" if len(reached) > 1 else "")
        return f"{self.mean:.{digits}f} ({low}..{high})"


@dataclass(frozen=True)
class Summary:
    """The seeds of an arm. to_goal: see `first_step`. explained: None without a critic."""

    to_goal: Spread
    reward: Spread
    held_out: Spread
    explained: Spread | None


def summary(records: Mapping[str, Mapping[str, Any]], goal: float) -> Summary:
    of_seeds = list(records.values())
    has_critic = any(value is not None for value in of_seeds[0]["explained"])
    return Summary(
        Spread.of(first_step(record["reward"], goal) for record in of_seeds),
        Spread.of(end_mean(record["reward"]) for record in of_seeds),
        Spread.of(record["held_out"] for record in of_seeds),
        Spread.of(end_mean(record["explained"]) for record in of_seeds) if has_critic else None,
    )


def first_step(values: Sequence[float | None], goal: float) -> float:
    """First step whose mean of SMOOTHED steps up to it is at least `goal`; inf if none is."""
    for end in range(SMOOTHED, len(values) + 1):
        if mean(values[end - SMOOTHED : end]) >= goal:
            return end
    return math.inf


def end_mean(values: Sequence[float | None]) -> float:
    return mean(values[-LAST:])


def mean(values: Sequence[float | None]) -> float:
    """NaN if one of them was not finite."""
    return math.nan if None in values else math.fsum(value or 0.0 for value in values) / len(values)


def missing(results: Results, seeds: Sequence[int]) -> dict[str, dict[str, list[int]]]:
    """Task -> arm -> seeds whose run has not finished."""
    left: dict[str, dict[str, list[int]]] = {}
    for task in TASKS:
        for arm in ARMS:
            if left_out := [seed for seed in seeds if str(seed) not in results.get(task, {}).get(arm, {})]:
                left.setdefault(task, {})[arm] = left_out
    return left
