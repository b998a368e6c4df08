"""Block of statistics that a run prints every few steps: rewards, lengths, advantages, stages with rates and memory. It is made
from the steps' metrics alone, so any log can be summarised again. Moments are pooled, rates are means over time, memory is the
largest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megappo.telemetry.metrics import MODEL_STAGES, MOMENTS, REWARD_MODEL_STAGE, STAGES, Metric
from megappo.telemetry.tables import figures, table

Row = Mapping[str, float]
UNITS = (("PFLOP", 1e3), ("TFLOP", 1.0), ("GFLOP", 1e-3), ("MFLOP", 1e-6))
RATES = (Metric.STAGE_TOKENS, Metric.TFLOPS, Metric.MFU, Metric.HFU)


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
    return [f"--- {steps}", *_moments(rows), *_stages(rows), *_work(rows), *more, "---"]


class Pooled:
    """Moments over several steps: count-weighted mean, population deviation, extremes."""

    def __init__(self, rows: Sequence[Row], names: Mapping[str, str], weights: Sequence[float]) -> None:
        """Pool the rows. names: moment -> name of its metric."""
        known = [(row, weight) for row, weight in zip(rows, weights) if _finite(row.get(names["mean"]))]
        total = sum(weight for _, weight in known)
        self.count = len(known)
        if not known or total == 0:
            self.mean = self.std = self.min = self.max = math.nan
            return
        mean = self.mean = sum(weight * row[names["mean"]] for row, weight in known) / total
        # Variance around the pooled mean: each step's own variance plus its squared distance.
        around = sum(weight * (row[names["std"]] ** 2 + (row[names["mean"]] - mean) ** 2) for row, weight in known) / total
        self.std = math.sqrt(around)
        self.min = min(row[names["min"]] for row, _ in known)
        self.max = max(row[names["max"]] for row, _ in known)


def _moments(rows: Sequence[Row]) -> list[str]:
    # Steps have equally many responses, but not equally many tokens
    per_response = [1.0] * len(rows)
    # No response may end in a step (rollout.partial_rollout_tokens), which has no mean length then.
    per_token = [mean if _finite(mean := row.get(Metric.RESPONSE_MEAN)) else 0.0 for row in rows]
    parts = dict.fromkeys(name.removesuffix("/std") for row in rows for name in row if _is_part(name))
    lines = [
        ("score", _members("reward/score_"), per_response),
        ("  rules together", _members(Metric.RULES.of("")), per_response),
        ("  models together", _members(Metric.MODELS.of("")), per_response),
        *(
            (
                f"  {name.removeprefix('reward/')}",
                {**_members(f"{name}/"), "mean": name},
                [row.get(f"{name}/share", 1.0) for row in rows],
            )
            for name in parts
        ),
        ("score - KL", _members(Metric.SHAPED.of("")), per_response),
        ("response tokens", _members("lengths/response_"), per_response),
        ("total tokens", _members(Metric.TOTAL_LENGTH.of("")), per_response),
        ("advantage", _members(Metric.ADVANTAGE.of("")), per_token),
        ("return", _members(Metric.RETURN.of("")), per_token),
        ("value", _members(Metric.VALUE.of("")), per_token),
    ]
    cells = []
    for title, names, weights in lines:
        pooled = Pooled(rows, names, weights)
        if pooled.count:
            cells.append([title, *(_number(getattr(pooled, moment)) for moment in MOMENTS)])
    return table(["", *MOMENTS], cells) if cells else []


def _is_part(name: str) -> bool:
    return name.startswith(Metric.REWARD_PART.of("")) and name.endswith("/std")


def _members(beginning: str) -> dict[str, str]:
    return {moment: f"{beginning}{moment}" for moment in MOMENTS}


def _stages(rows: Sequence[Row]) -> list[str]:
    step_s = _total(rows, Metric.STEP_SECONDS) / len(rows)
    if step_s == 0:
        return []
    unit, scale = _unit([row[name] for row in rows for name in row if name.startswith(Metric.TFLOPS.of(""))])
    peaks = not any(name.endswith("_end_gib") for row in rows for name in row)
    memory = "peak GiB" if peaks else "GiB at end"
    header = ["stage", "s/step", "share", "tok/s/rank", f"{unit}/s/rank", "MFU", "HFU", memory]
    cells = []
    for stage in (*STAGES, "step"):
        seconds_name = Metric.STAGE_SECONDS.of(f"{stage}_s")
        if not any(seconds_name in row for row in rows):
            continue
        # A stage that runs every tenth step costs a tenth of its time per step.
        seconds = _total(rows, seconds_name) / len(rows)
        tokens, tflops, mfu, hfu = (_rate(rows, metric.of(stage), seconds_name) for metric in RATES)
        of = STAGES if stage == "step" else (stage,)
        largest = _largest(rows, [Metric.STAGE_MEMORY.of(f"{one}_{suffix}") for one in of for suffix in ("peak_gib", "end_gib")])
        row = [
            "whole step" if stage == "step" else stage,
            figures(seconds),
            f"{seconds / step_s:.1%}",
            "" if tokens is None else f"{tokens:,.0f}",
            "" if tflops is None else figures(tflops / scale),
            *("" if share is None else f"{share:.1%}" for share in (mfu, hfu)),
            "" if largest is None else f"{largest:.2f}",
        ]
        cells.append(row)
    used = [column for column in range(len(header)) if any(row[column] for row in cells)]
    return table([header[column] for column in used], [[row[column] for column in used] for row in cells])


def _work(rows: Sequence[Row]) -> list[str]:
    scored = any(name.startswith(Metric.TFLOP.of(f"{REWARD_MODEL_STAGE}/")) for row in rows for name in row)
    columns = [stage for stage in STAGES if stage in MODEL_STAGES or (scored and stage == REWARD_MODEL_STAGE)]
    work = {role: [_total(rows, Metric.TFLOP.of(f"{stage}/{role}")) / len(rows) for stage in columns] for role in _roles(rows)}
    done = {role: stages for role, stages in work.items() if any(stages)}
    unit, scale = _unit([tflop for stages in done.values() for tflop in stages])
    cells = [[role, *(figures(tflop / scale) if tflop else "" for tflop in stages)] for role, stages in done.items()]
    return table([f"{unit}/step", *columns], cells) if cells else []


def _roles(rows: Sequence[Row]) -> list[str]:
    found = {name.rsplit("/", 1)[-1] for row in rows for name in row if name.startswith(Metric.TFLOP.of(""))}
    return sorted(found, key=lambda role: (role != "policy", not role.startswith("critic"), role))


def _unit(tflops: Sequence[float]) -> tuple[str, float]:
    largest = max(tflops, default=0.0)
    return next(((name, size) for name, size in UNITS if largest >= size), UNITS[-1])


def _total(rows: Sequence[Row], name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows)


def _rate(rows: Sequence[Row], name: str, seconds: str) -> float | None:
    known = [row for row in rows if name in row]
    time = sum(row[seconds] for row in known)
    return sum(row[name] * row[seconds] for row in known) / time if time > 0 else None


def _largest(rows: Sequence[Row], names: Sequence[str]) -> float | None:
    return max((row[name] for row in rows for name in names if name in row), default=None)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _number(value: float) -> str:
    return f"{value:.5g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.3g}"
