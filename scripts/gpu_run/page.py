"""The page about a first run on a GPU: parts that ran, failures with their last lines, measurements; and its tables in the docs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join
from typing import Any

from scripts.gpu_run.parts import Command, Part, Place

# Last lines of a log on the page; the whole log lies beside it.
MOST_LINES, MOST_LINES_OF_A_FAILURE = 120, 60


@dataclass(frozen=True)
class Outcome:
    """Outcome of a part: left out, or run to an exit code (None: killed after `limit_s`) in `seconds`. still: what the page says of
    one that has not ended."""

    part: Part
    left_out: str | None = None
    still: str | None = None
    command: Command | None = None
    code: int | None = None
    seconds: float = 0.0
    log: Path | None = None
    limit_s: float = 0.0

    @property
    def failed(self) -> bool:
        return self.left_out is None and self.still is None and self.code != 0

    @property
    def summary(self) -> str:
        if self.left_out is not None:
            return f"left out: {self.left_out}"
        if self.still is not None:
            return self.still
        if self.code is None:
            return f"FAILED: killed after {self.limit_s:.0f} s"
        return f"{'FAILED: exit code ' + str(self.code) if self.code else 'ok'}, {self.seconds:.0f} s"


def page(outcomes: Sequence[Outcome], place: Place) -> str:
    """Markdown: a table of all parts, then the output of each."""
    where = f"{place.num_gpus} GPU(s)" if place.on_gpu else "rehearsal on the CPU: no figure on this page is a GPU's"
    lines = [f"# First run on a GPU ({where})", "", "| part | outcome |", "| --- | --- |"]
    lines += [f"| {outcome.part.title} | {outcome.summary} |" for outcome in outcomes]
    for outcome in outcomes:
        if outcome.log is not None and outcome.log.exists() and outcome.command is not None:
            shown = _own_page(outcome, place) or _fenced(outcome)
            lines += [
                "",
                f"## {outcome.part.title}",
                "",
                outcome.summary,
                "",
                f"    {join(outcome.command)}".replace("\n", "\n    "),
            ]
            lines += ["", *shown]
    return "\n".join(lines) + "\n"


def _own_page(outcome: Outcome, place: Place) -> list[str]:
    """The Markdown that the part wrote, also in the time until it was killed; empty if it wrote none."""
    if (
        outcome.part.page is None
        or (outcome.failed and outcome.code is not None)
        or not (place.folder / outcome.part.page).exists()
    ):
        return []
    return (place.folder / outcome.part.page).read_text(encoding="utf-8").splitlines()


def _fenced(outcome: Outcome) -> list[str]:
    assert outcome.log is not None
    lines = outcome.log.read_text(encoding="utf-8", errors="replace").splitlines()
    most = MOST_LINES_OF_A_FAILURE if outcome.failed else MOST_LINES
    cut = [f"... {len(lines) - most} lines before are in {outcome.log.name}"] if len(lines) > most else []
    # Four backticks: a log may hold three.
    return ["````", *cut, *lines[-most:], "````"]


# -------------------------------------------------------------------------------------------------------------- into the docs

BEGIN, END = "<!-- first_gpu_run -->", "<!-- /first_gpu_run -->"
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


def record(outcomes: Sequence[Outcome], place: Place, machine: Mapping[str, Any]) -> dict[str, Any]:
    """What the docs take of a run, for a JSON file. machine: see `facts_of_machine`."""
    parts = [
        {"title": o.part.title, "summary": o.summary, "failed": o.failed, "table": _table(_own_page(o, place) if o.log else [])}
        for o in outcomes
    ]
    return {"on_gpu": place.on_gpu, **machine, "parts": parts}


def _table(lines: Sequence[str]) -> list[str]:
    """The tables of a page, each under the heading before it."""
    found: list[str] = []
    heading = ""
    for line in lines:
        if line.startswith(("#", "**")):
            heading = line.strip("# ")
        elif line.startswith("|"):
            found += [*(["", heading, ""] if heading else []), line]
            heading = ""
    return found


def into_docs(run: Mapping[str, Any], text: str) -> str:
    """Put a run's tables between the marks of a page's text. ValueError for a rehearsal, a page without marks, and a table that
    names a folder of the machine."""
    if not run["on_gpu"]:
        raise ValueError("a rehearsal has no figure of a GPU")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no marks {BEGIN} and {END}")
    short = re.search(r"\b[A-Z]{1,3}\d{2,4}[A-Z]?\b", run["gpu"])
    count = NUMBERS[run["num_gpus"]] if run["num_gpus"] < len(NUMBERS) else str(run["num_gpus"])
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    lines = [
        f"{run['date']}: {count} {short[0] if short else run['gpu']} ({run['gpu']}), {versions}; `scripts/first_gpu_run.sh`.",
        "",
        *("| part | outcome |", "| --- | --- |", *(f"| {part['title']} | {part['summary']} |" for part in run["parts"])),
    ]
    for part in run["parts"]:
        if part["table"] and not part["failed"]:
            lines += ["", f"**{part['title']}**", "", *part["table"]]
    named = [line for line in lines if re.search(r"(?<![\w.])/(?:home|root|tmp|work|usr|opt|mnt|data|var)/", line)]
    if named:
        raise ValueError(f"a folder of the machine is in a table: {named[0]}")
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
    return f"{before}{begin}\n\n{body}\n\n{end}{after}"
