"""The page about a first run on a GPU: parts that ran, failures with their last lines, measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join

from scripts.gpu_run.parts import Command, Part, Place

# Last lines of a log on the page; the whole log lies beside it.
MOST_LINES, MOST_LINES_OF_A_FAILURE = 120, 60


@dataclass(frozen=True)
class Outcome:
    """Outcome of a part: left out, or run to an exit code (None: killed after its time) in `seconds`."""

    part: Part
    left_out: str | None = None
    command: Command | None = None
    code: int | None = None
    seconds: float = 0.0
    log: Path | None = None

    @property
    def failed(self) -> bool:
        return self.left_out is None and self.code != 0

    @property
    def summary(self) -> str:
        if self.left_out is not None:
            return f"left out: {self.left_out}"
        if self.code is None:
            return f"FAILED: killed after {self.part.limit_s} s"
        return f"{'FAILED: exit code ' + str(self.code) if self.code else 'ok'}, {self.seconds:.0f} s"


def page(outcomes: Sequence[Outcome], place: Place) -> str:
    """Markdown: a table of all parts, then the output of each."""
    where = f"{place.num_gpus} GPU(s)" if place.on_gpu else "rehearsal on the CPU: no figure on this page is a GPU's"
    lines = [f"# First run on a GPU ({where})", "", "| part | outcome |", "| --- | --- |"]
    lines += [f"| {outcome.part.title} | {outcome.summary} |" for outcome in outcomes]
    for outcome in outcomes:
        if outcome.log is not None and outcome.command is not None:
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
    """The Markdown that the part wrote; empty if it wrote none."""
    if outcome.part.page is None or outcome.failed or not (place.folder / outcome.part.page).exists():
        return []
    return (place.folder / outcome.part.page).read_text(encoding="utf-8").splitlines()


def _fenced(outcome: Outcome) -> list[str]:
    assert outcome.log is not None
    lines = outcome.log.read_text(encoding="utf-8", errors="replace").splitlines()
    most = MOST_LINES_OF_A_FAILURE if outcome.failed else MOST_LINES
    cut = [f"... {len(lines) - most} lines before are in {outcome.log.name}"] if len(lines) > most else []
    # Four backticks: a log may hold three.
    return ["````", *cut, *lines[-most:], "````"]
