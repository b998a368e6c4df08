"""Curves of one metric in several runs, and the distance between them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megappo.commands.runs.read import Rows, finite, is_known, logged_names, nearest_hint
from megappo.config.errors import ConfigError
from megappo.config.supervised import KINDS
from megappo.telemetry.metrics import Metric, of_kind

# Metrics that are compared if none is named.
SHOWN = (
    Metric.SCORE_MEAN.value,
    Metric.EVAL_SCORE.value,
    Metric.EVAL_PART.of("*/mean@*"),
    Metric.EVAL_LOSS.value,
    Metric.EVAL_PART.of("accuracy"),
    Metric.KL_TOKEN.value,
    Metric.POLICY_LOSS.value,
    Metric.POLICY_GRAD_NORM.value,
    Metric.POLICY_ENTROPY.value,
    Metric.CRITIC_LOSS.value,
    Metric.CRITIC_GRAD_NORM.value,
    Metric.CRITIC_EXPLAINED_VARIANCE.value,
    Metric.RESPONSE_MEAN.value,
    *(of_kind(metric.value, kind) for kind in KINDS for metric in (Metric.SFT_LOSS, Metric.SFT_GRAD_NORM)),
    Metric.REWARD_MODEL_ACCURACY.value,
    Metric.DPO_ACCURACY.value,
    Metric.DPO_MARGIN.value,
)
NUM_COLUMNS = 4  # steps shown, the last included

Curve = Mapping[int, float | None]  # step -> value, ascending; None where it was not finite


@dataclass(frozen=True)
class Difference:
    """Distance of curves over the `steps` that all of them have."""

    steps: int
    largest: float | None  # largest less smallest value of a step; inf if only some are finite, None without a common step
    at: int | None  # step of `largest`
    parts: int | None  # first step where they differ by more than the tolerance
    missing: str  # a line on the first step that only some have; empty without one


def find_metrics(patterns: Sequence[str], runs: Sequence[Rows], option: str) -> list[str]:
    """Find the logged names that match; `*` stands for any part. Raises ConfigError, one line, for a pattern without a match."""
    logged = sorted(set().union(*map(logged_names, runs)))
    names: list[str] = []
    for pattern in patterns:
        found = [name for name in logged if name == pattern or ("*" in pattern and fnmatchcase(name, pattern))]
        if not found:
            reason = (
                "no run has logged it" if is_known(pattern, logged) else f"no run has such a metric{nearest_hint(pattern, logged)}"
            )
            raise ConfigError(f"{option} {pattern}: {reason}")
        names += found
    return list(dict.fromkeys(names))


def usual_metrics(runs: Sequence[Rows]) -> list[str]:
    """List the metrics of SHOWN that a run has logged. Raises ConfigError if there are none."""
    logged = sorted(set().union(*map(logged_names, runs)))
    names = [name for pattern in SHOWN for name in logged if fnmatchcase(name, pattern)]
    if not names:
        example = f", for example --metric {logged[0]}" if logged else ""
        raise ConfigError(f"compare: no run has logged a score, a loss or a KL; name metrics{example}")
    return names


def curve_of(rows: Rows, metric: str, window: int = 1) -> Curve:
    """Take a metric's values, each averaged with the finite values before it, `window` in all."""
    values = {step: finite(rows[step][metric]) for step in sorted(rows) if metric in rows[step]}
    if window == 1:
        return values
    means: dict[int, float | None] = {}
    last: list[float] = []
    for step, value in values.items():
        last = last if value is None else [*last[1 - window :], value]
        means[step] = None if value is None else math.fsum(last) / len(last)
    return means


def difference(curves: Mapping[str, Curve], tolerance: float) -> Difference:
    """Compare curves by run. tolerance: relative to the largest absolute value of any of them."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves.values())))
    values = {step: [curve[step] for curve in curves.values()] for step in steps}
    scale = max((abs(value) for step in steps for value in values[step] if value is not None), default=0.0)
    spread = {step: apart for step in steps if (apart := _spread(values[step])) is not None}
    at = max(spread, key=lambda step: spread[step], default=None)
    parts = next((step for step, apart in spread.items() if apart > tolerance * scale), None)
    return Difference(len(spread), None if at is None else spread[at], at, parts, _missing(curves, set(steps)))


def _spread(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    # Infinitely far apart if only some are finite.
    return max(known) - min(known) if len(known) == len(values) else math.inf


def _missing(curves: Mapping[str, Curve], common: Collection[int]) -> str:
    lone = sorted(set().union(*curves.values()) - set(common))
    if not lone:
        return ""
    without = ", ".join(name for name, curve in curves.items() if lone[0] not in curve)
    more = f" (and at {len(lone) - 1} more)" if len(lone) > 1 else ""
    return f"{without} has no value at step {lone[0]}{more}"


def steps_to_show(curves: Mapping[str, Mapping[str, Curve]]) -> list[int]:
    """Choose NUM_COLUMNS steps from metric -> run -> curve, evenly spread up to the last step that all runs have reached."""
    of_metrics = [list(runs.values()) for runs in curves.values()]
    reached = [set().union(*of_run) for of_run in zip(*of_metrics)]
    steps = sorted(step for step in (set.intersection(*reached) or set.union(*reached)) if step > 0)
    return sorted(set(_spread_out(steps, [curve for runs in of_metrics for curve in runs]))) if steps else []


def _spread_out(steps: Sequence[int], curves: Sequence[Curve]) -> Iterator[int]:
    first, last = steps[0], steps[-1]
    for part in range(1, NUM_COLUMNS + 1):
        target = first + (last - first) * part / NUM_COLUMNS
        near = [step for step in steps if abs(step - target) <= (last - first) / (2.5 * NUM_COLUMNS)] or steps[-1:]
        # Prefer steps with many values: an evaluation every tenth step has few.
        yield max(near, key=lambda step: (sum(step in curve for curve in curves), -abs(step - target)))
