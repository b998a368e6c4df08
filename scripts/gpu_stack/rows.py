"""Rows of the table: a check and its outcome. Every file of checks ends with `run(GROUP, CHECKS)`.

A check is a name and a function that returns its detail; it raises `Wrong` or `Skipped` with a reason. A file of checks runs as a
process of its own, which prints a line per row as soon as it is known: what a crash leaves undone is then known by name too.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Result = Literal["ok", "FAILED", "skipped"]
Check = tuple[str, Callable[[], str]]
# Set rows apart from what the libraries print.
MARK = "@row "
DETAIL_WIDTH = 150


class Wrong(Exception):
    """A check failed; the text names the fault and the fix."""


class Skipped(Exception):
    """A check cannot run here; the text gives the reason."""


@dataclass(frozen=True)
class Row:
    group: str
    name: str
    result: Result
    detail: str


def outcome(group: str, check: Check) -> Row:
    name, function = check
    try:
        return Row(group, name, "ok", function())
    except Skipped as reason:
        return Row(group, name, "skipped", str(reason))
    except Wrong as fault:
        return Row(group, name, "FAILED", str(fault))
    except Exception as error:  # whatever the libraries raise is the finding, and the other checks go on
        traceback.print_exc()
        return Row(group, name, "FAILED", f"{type(error).__name__}: {error}")


def run(group: str, checks: Iterable[Check]) -> None:
    """Run the checks of a group and print their rows for the process that collects them."""
    for check in checks:
        print(f"{MARK}{json.dumps({'started': check[0]})}", flush=True)
        print(f"{MARK}{json.dumps(asdict(outcome(group, check)))}", flush=True)


def rows_in(output: str) -> tuple[list[Row], str]:
    """Parse the output of `run`: (finished rows, name of the check that was started and not finished, "" if none)."""
    rows: list[Row] = []
    started = ""
    for line in output.splitlines():
        if not line.startswith(MARK):
            continue
        fields = json.loads(line.removeprefix(MARK))
        if "started" in fields:
            started = fields["started"]
        else:
            rows.append(Row(**fields))
            started = ""
    return rows, started


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of the table, groups apart; long details are cut to one line (whole in the JSON file)."""
    width = max((len(row.name) for row in rows), default=0)
    group = ""
    for row in rows:
        if row.group != group:
            group = row.group
            yield group
        detail = " ".join(row.detail.split())
        short = detail if row.result == "FAILED" or len(detail) <= DETAIL_WIDTH else f"{detail[: DETAIL_WIDTH - 3]}..."
        yield f"  {row.name.ljust(width)}  {row.result:7}  {short}"
