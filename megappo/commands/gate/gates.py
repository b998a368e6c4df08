"""`megappo gate`: check the metrics of a run against limits, for scripts and CI. Reads only metrics.jsonl; imports no torch.

docs/evaluation.md has the forms of a gate. An unknown value fails: of a step that was not reached or not logged, or logged as not
finite (null).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.commands.runs.read import Rows, finite, is_known, logged_names, nearest_hint, read_rows, value_text
from megappo.config.errors import ConfigError, show
from megappo.config.run_directory import METRICS
from megappo.config.yaml_reader import parse_yaml
from megappo.telemetry.tables import table

FORMS = "METRIC > NUMBER at STEP (or: at last, max over A..B, mean over last N; max, min, mean; > >= < <=)"
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "min": min,
    "mean": lambda values: math.fsum(values) / len(values),
}
_GATE = re.compile(
    r"(?P<metric>\S+)\s*(?P<op>[<>]=?)\s*(?P<limit>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s+"
    r"(?:at\s+(?P<at>\d{1,12}|last)"
    r"|(?P<how>max|min|mean)\s+over\s+(?:(?P<first>\d{1,12})\.\.(?P<final>\d{1,12})|last\s+(?P<count>\d{1,12})))"
)


@dataclass(frozen=True)
class Gate:
    """One limit; the value is taken at one step or reduced over several."""

    text: str
    metric: str
    op: str
    limit: float
    at: int | None = None  # None: the last value, unless `how` is set
    how: str | None = None  # reduction over `steps` or `count`
    steps: tuple[int, int] | None = None  # first, last
    count: int | None = None  # of last values


@dataclass(frozen=True)
class Outcome:
    """A gate applied to a run."""

    gate: Gate
    value: float | None
    reason: str = ""  # why the value is missing

    @property
    def passed(self) -> bool:
        return self.value is not None and OPERATORS[self.gate.op](self.value, self.gate.limit)


class _Missing(Exception):
    """The value of a gate does not exist; the message says why."""


def show_gates(run_dir: Path, file: Path) -> int:
    """Print a row per gate; return 0 if all pass, else 1. Raises ConfigError, one line: no run, no gates, an unknown metric."""
    gates = read_gates(file)
    rows = read_rows(run_dir)
    logged = logged_names(rows)
    for gate in gates:
        _require_known(gate, logged, run_dir)
    outcomes = [hold(gate, rows) for gate in gates]
    cells = [[one.gate.text, value_text(one.value), "pass" if one.passed else "FAIL"] for one in outcomes]
    lines = table(["gate", "value", "result"], cells)
    reasons = [f"  {one.gate.text}: {one.reason}" for one in outcomes if one.reason]
    failed = sum(not one.passed for one in outcomes)
    print("\n".join([*lines, *reasons, f"\n{len(outcomes) - failed} of {len(outcomes)} gates pass"]))
    return int(failed > 0)


# ------------------------------------------------------------------------------------------------------------------- gates


def read_gates(file: Path) -> list[Gate]:
    """Read a file of gates. Raises ConfigError that names the malformed line."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ConfigError(f"{file}: {reason}; name a YAML list of gates, each {FORMS}") from None
    data, _ = parse_yaml(text, str(file))
    if not isinstance(data, list) or not data:
        raise ConfigError(f"{file}: must be a YAML list with one gate or more, each {FORMS}")
    return [parse_gate(line, f"{file}: gate {number}") for number, line in enumerate(data, 1)]


def parse_gate(line: Any, place: str) -> Gate:
    """Parse one line. Raises ConfigError with its place and the allowed forms."""
    match = _GATE.fullmatch(line.strip()) if isinstance(line, str) else None
    if match is None:
        raise ConfigError(f"{place} = {show(line)}: is no gate; write {FORMS}")
    text, limit = " ".join(line.split()), float(match["limit"])
    of = {"text": text, "metric": match["metric"], "op": match["op"], "limit": limit}
    if not math.isfinite(limit):
        raise ConfigError(f"{place} = {show(line)}: {match['limit']} is not a finite number")
    if match["at"] is not None:
        return Gate(**of, at=None if match["at"] == "last" else int(match["at"]))
    if match["count"] is not None:
        if (count := int(match["count"])) == 0:
            raise ConfigError(f"{place} = {show(line)}: over last 0 is over nothing; use 1 or more")
        return Gate(**of, how=match["how"], count=count)
    first, final = int(match["first"]), int(match["final"])
    if first > final:
        raise ConfigError(f"{place} = {show(line)}: {first}..{final} is no range; write {final}..{first}")
    return Gate(**of, how=match["how"], steps=(first, final))


# --------------------------------------------------------------------------------------------------------------------- run


def _require_known(gate: Gate, logged: set[str], run_dir: Path) -> None:
    """Raise ConfigError, with the nearest name, for a metric that the run has not logged and megappo does not know."""
    if not is_known(gate.metric, logged):
        raise ConfigError(f"{gate.text}: {run_dir / METRICS} has no metric {gate.metric}{nearest_hint(gate.metric, logged)}")


def hold(gate: Gate, rows: Rows) -> Outcome:
    """Apply one gate to the rows of a run (step -> metric -> value)."""
    try:
        return Outcome(gate, _value(gate, rows))
    except _Missing as reason:
        return Outcome(gate, None, str(reason))


def _value(gate: Gate, rows: Rows) -> float:
    steps, reached = sorted(step for step, row in rows.items() if gate.metric in row), max(rows)
    wanted = gate.at if gate.steps is None else gate.steps[1]
    if wanted is not None and wanted > reached:
        raise _Missing(f"step {wanted} was never reached; the run's last step is {reached}")
    if not steps:
        raise _Missing("was never logged")
    if gate.steps is not None:
        chosen = [step for step in steps if gate.steps[0] <= step <= gate.steps[1]]
    elif gate.count is not None:
        chosen = steps[-gate.count :]
    else:
        chosen = [step for step in steps if step == gate.at] if gate.at is not None else steps[-1:]
    if not chosen:
        logged = ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
        raise _Missing(f"was not logged there; it was at step {logged}")
    if gate.count is not None and len(chosen) < gate.count:
        raise _Missing(f"has {len(chosen)} values only")
    values = [_finite(rows[step][gate.metric], step) for step in chosen]
    return values[0] if gate.how is None else REDUCTIONS[gate.how](values)


def _finite(value: Any, step: int) -> float:
    if (number := finite(value)) is None:
        raise _Missing(f"was not finite at step {step}")
    return number
