"""`megappo gate`: check the metrics of a run against limits, for scripts and CI. Reads only metrics.jsonl; imports no torch.

docs/evaluation.md has the forms of a gate. An unknown value fails: of a step that was not reached or not logged, or logged as not
finite (null).
"""

from __future__ import annotations

import math
import operator
import re
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from megappo.commands.runs.read import Rows, finite, is_known, logged_names, nearest_hint, read_rows, value_text
from megappo.config.errors import ConfigError, show
from megappo.config.run_directory import METRICS
from megappo.config.yaml_reader import parse_yaml
from megappo.telemetry.tables import table

FORMS = "METRIC > NUMBER at STEP (or: at last, max over A..B, mean over last N; max, min, mean; > >= < <=)"
OPERATORS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
REDUCTIONS = {"max": max, "min": min, "mean": fmean}
_GATE = re.compile(
    r"(?P<metric>\S+)\s*(?P<op>[<>]=?)\s*(?P<limit>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s+"
    r"(?:at\s+(?P<at>\d{1,12}|last)"
    r"|(?P<how>max|min|mean)\s+over\s+(?:(?P<first>\d{1,12})\.\.(?P<final>\d{1,12})|last\s+(?P<count>\d{1,12})))"
)


class Gate(NamedTuple):
    """One limit on the values of a metric: the last `count` ones, or those of the steps `first` to `final`."""

    text: str
    metric: str
    op: str
    limit: float
    how: str
    count: int | None
    first: int = 0
    final: int = 0


class Verdict(NamedTuple):
    """A gate applied to a run."""

    gate: Gate
    value: float | None
    reason: str = ""  # why the value is missing

    @property
    def passed(self) -> bool:
        return self.value is not None and OPERATORS[self.gate.op](self.value, self.gate.limit)


def show_gates(run_dir: Path, file: Path) -> int:
    """Print a row per gate; return 0 if all pass, else 1. Raises ConfigError, one line: no run, no gates, an unknown metric."""
    gates, rows = read_gates(file), read_rows(run_dir)
    logged = logged_names(rows)
    for gate in gates:
        if not is_known(gate.metric, logged):
            hint = nearest_hint(gate.metric, logged)
            raise ConfigError(f"{gate.text}: {run_dir / METRICS} has no metric {gate.metric}{hint}")
    verdicts = [hold(gate, rows) for gate in gates]
    cells = [[one.gate.text, value_text(one.value), "pass" if one.passed else "FAIL"] for one in verdicts]
    reasons = [f"  {one.gate.text}: {one.reason}" for one in verdicts if one.reason]
    passed = sum(one.passed for one in verdicts)
    print("\n".join([*table(["gate", "value", "result"], cells), *reasons, f"\n{passed} of {len(verdicts)} gates pass"]))
    return int(passed < len(verdicts))


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
    limit, at, count = float(match["limit"]), match["at"], match["count"]
    first, final = int(match["first"] or 0), int(match["final"] or 0)
    if not math.isfinite(limit):
        raise ConfigError(f"{place} = {show(line)}: {match['limit']} is not a finite number")
    if count is not None and int(count) == 0:
        raise ConfigError(f"{place} = {show(line)}: over last 0 is over nothing; use 1 or more")
    if first > final:
        raise ConfigError(f"{place} = {show(line)}: {first}..{final} is no range; write {final}..{first}")
    start = (" ".join(line.split()), match["metric"], match["op"], limit, match["how"] or "max")  # one value is its own maximum
    if at == "last" or count is not None:
        return Gate(*start, count=int(count or 1))
    return Gate(*start, count=None, first=int(at or first), final=int(at or final))


def hold(gate: Gate, rows: Rows) -> Verdict:
    """Apply one gate to the rows of a run (step -> metric -> value)."""
    steps, reached = sorted(step for step, row in rows.items() if gate.metric in row), max(rows)
    if gate.count is None and gate.final > reached:
        return Verdict(gate, None, f"step {gate.final} was never reached; the run's last step is {reached}")
    if not steps:
        return Verdict(gate, None, "was never logged")
    chosen = [step for step in steps if gate.first <= step <= gate.final] if gate.count is None else steps[-gate.count :]
    if not chosen:
        logged = ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
        return Verdict(gate, None, f"was not logged there; it was at step {logged}")
    if gate.count is not None and len(chosen) < gate.count:
        return Verdict(gate, None, f"has {len(chosen)} values only")
    values = {step: finite(rows[step][gate.metric]) for step in chosen}
    for step, value in values.items():
        if value is None:
            return Verdict(gate, None, f"was not finite at step {step}")
    return Verdict(gate, REDUCTIONS[gate.how](values.values()))
