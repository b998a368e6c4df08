"""Metrics of a run by step, read from its metrics.jsonl: beside a live run, after a crash, and after a resume. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megappo.commands.runs.read import METRICS
from megappo.config.errors import ConfigError
from megappo.telemetry.jsonl import read_lines
from megappo.telemetry.metrics import Metric
from megappo.telemetry.names import nearest_name

Rows = Mapping[int, Mapping[str, Any]]
"""Step -> metric -> value as it was logged; None where it was not finite."""


def read_rows(run_dir: Path) -> Rows:
    """Read all rows. Of a step that was logged twice the later values count. ConfigError, one line: no run, or nothing logged."""
    path = run_dir / METRICS
    try:
        records = read_lines(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name the directory of a run (run.output_dir/run.name)") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8; it is not a file of megappo") from None
    rows: dict[int, dict[str, Any]] = {}
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise ConfigError(f"{path}, record {number}: has no step; it is not a line of megappo")
        values = {name: value for name, value in record.items() if "/" in name}
        rows.setdefault(record["step"], {}).update(values)  # an evaluation may have a line of its own
    if not rows:
        raise ConfigError(f"{path}: has no line yet; the run has logged no step")
    return rows


def logged_names(rows: Rows) -> set[str]:
    return {name for row in rows.values() for name in row}


def is_known(metric: str, logged: Collection[str]) -> bool:
    """If a metric was logged, or is one that megappo logs."""
    return metric in logged or (metric in set(Metric) and "*" not in metric)


def nearest_hint(metric: str, logged: Collection[str]) -> str:
    """`; did you mean NAME?` for a metric that is not known, or nothing."""
    nearest = nearest_name(metric, sorted(logged))
    return f"; did you mean {nearest}?" if nearest else ""


def finite(value: Any) -> float | None:
    """The value as a number; None if it is none, or not finite."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def value_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
