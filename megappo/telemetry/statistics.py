"""Block of statistics that a run prints every few steps: rewards, lengths, advantages, stages with rates and memory. It is made
from the steps' metrics alone, so any log can be summarised again. Moments are pooled, rates are means over time, memory is the
largest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megappo.telemetry.metrics import MOMENTS, STAGES, Metric
from megappo.telemetry.tables import figures, table, table_of

Row = Mapping[str, float]
UNITS = (("PFLOP", 1e3), ("TFLOP", 1.0), ("GFLOP", 1e-3), ("MFLOP", 1e-6))


class StatisticsBlock:
    """Collects the metrics of steps; every `every` steps, and at the run's end, they become a block. 0: never."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._rows: list[Row] = []
        self._first = 0

    def add(self, row: Row, step: int, *, is_last: bool, more: Sequence[str] = ()) -> list[str]:
        """Take a step; return the lines to print now, if any. more: lines for the end of a block."""
        if self._every == 0:
            return []
        self._first = self._first if self._rows else step
        self._rows.append(row)
        if step % self._every and not is_last:
            return []
        rows, self._rows = self._rows, []
        return block(rows, self._first, step, more)


def block(rows: Sequence[Row], first: int, last: int, more: Sequence[str] = ()) -> list[str]:
    """Return the lines of the block on steps `first` to `last`. rows: their metrics by name. more: lines before the last."""
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    moments = [[title, *map(_number, found)] for title, found in _moments(rows)]
    stages = table_of(list(_stages(rows)))
    return [f"--- {steps}", *(table(["", *MOMENTS], moments) if moments else []), *stages, *more, "---"]


def pooled(rows: Sequence[Row], names: Mapping[str, str], weights: Sequence[float]) -> list[float] | None:
    """Pool mean, population deviation, least and largest of steps: the MOMENTS of all their samples together. names: moment -> name
    of its metric. weights: samples of each step, up to a factor. None without a step that has both."""
    known = [(row, weight) for row, weight in zip(rows, weights) if weight and _finite(row.get(names["mean"]))]
    if not known:
        return None
    share = [weight for _, weight in known]
    means, deviations, least, largest = (np.array([row[names[moment]] for row, _ in known]) for moment in MOMENTS)
    mean = np.average(means, weights=share)
    # Variance around the pooled mean: each step's own variance plus its squared distance.
    deviation = math.sqrt(np.average(deviations**2 + (means - mean) ** 2, weights=share))
    return [float(mean), deviation, float(least.min()), float(largest.max())]


def _moments(rows: Sequence[Row]) -> Iterator[tuple[str, list[float]]]:
    # Steps have equally many responses, but not equally many tokens
    per_response = [1.0] * len(rows)
    # No response may end in a step (rollout.partial_rollout_tokens), which has no mean length then.
    per_token = [row[Metric.RESPONSE_MEAN] if _finite(row.get(Metric.RESPONSE_MEAN)) else 0.0 for row in rows]
    of_part = Metric.REWARD_PART.of("")
    deviations = dict.fromkeys(name for row in rows for name in row if name.startswith(of_part) and name.endswith("/std"))
    parts = [name.removesuffix("/std") for name in deviations]
    for title, start, weights in (
        ("score", "reward/score_", per_response),
        ("  rules together", Metric.RULES.of(""), per_response),
        ("  models together", Metric.MODELS.of(""), per_response),
        *((f"  {name.removeprefix('reward/')}", name, [row.get(f"{name}/share", 1.0) for row in rows]) for name in parts),
        ("score - KL", Metric.SHAPED.of(""), per_response),
        ("response tokens", "lengths/response_", per_response),
        ("total tokens", Metric.TOTAL_LENGTH.of(""), per_response),
        ("advantage", Metric.ADVANTAGE.of(""), per_token),
        ("return", Metric.RETURN.of(""), per_token),
        ("value", Metric.VALUE.of(""), per_token),
    ):
        names = {moment: f"{start}{moment}" for moment in MOMENTS}
        if start in parts:  # reward/PART is the mean itself
            names = {moment: f"{start}/{moment}" for moment in MOMENTS} | {"mean": start}
        if (found := pooled(rows, names, weights)) is not None:
            yield title, found


def _stages(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    step_s = _total(rows, Metric.STEP_SECONDS) / len(rows)
    flops = [row[name] for row in rows for name in row if name.startswith(Metric.TFLOPS.of(""))]
    unit, scale = next((one for one in UNITS if max(flops, default=0.0) >= one[1]), UNITS[-1])
    memory = "GiB at end" if any(name.endswith("_end_gib") for row in rows for name in row) else "peak GiB"
    for stage in (*STAGES, "step") if step_s else ():
        seconds_name = Metric.STAGE_SECONDS.of(f"{stage}_s")
        if not any(seconds_name in row for row in rows):
            continue
        # A stage that runs every tenth step costs a tenth of its time per step.
        seconds = _total(rows, seconds_name) / len(rows)
        metrics = (Metric.STAGE_TOKENS, Metric.TFLOPS, Metric.MFU, Metric.HFU)
        tokens, tflops, mfu, hfu = (_rate(rows, metric.of(stage), seconds_name) for metric in metrics)
        of = STAGES if stage == "step" else (stage,)
        names = [Metric.STAGE_MEMORY.of(f"{one}_{suffix}") for one in of for suffix in ("peak_gib", "end_gib")]
        largest = max((row[name] for row in rows for name in names if name in row), default=None)
        yield {
            "stage": "whole step" if stage == "step" else stage,
            "s/step": figures(seconds),
            "share": f"{seconds / step_s:.1%}",
            "tok/s/rank": "" if tokens is None else f"{tokens:,.0f}",
            f"{unit}/s/rank": "" if tflops is None else figures(tflops / scale),
            "MFU": "" if mfu is None else f"{mfu:.1%}",
            "HFU": "" if hfu is None else f"{hfu:.1%}",
            memory: "" if largest is None else f"{largest:.2f}",
        }


def _total(rows: Sequence[Row], name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows)


def _rate(rows: Sequence[Row], name: str, seconds: str) -> float | None:
    known = [row for row in rows if name in row]
    time = sum(row[seconds] for row in known)
    return sum(row[name] * row[seconds] for row in known) / time if time > 0 else None


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _number(value: float) -> str:
    return f"{value:.5g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.3g}"
