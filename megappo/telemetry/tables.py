"""Aligned plain-text tables, and short texts for numbers and ranks, for what commands and scripts print."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

MIB = 1 << 20
GIB = 1 << 30
SHOWN_GROUPS = 4
MOST_CHARACTERS = 300  # longest text that is printed on a line


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int | Collection[str] = 1) -> list[str]:
    """Return the lines of a table. left: columns that are left-aligned, the first so many or by their headings; the others are
    right-aligned."""
    named = header[:left] if isinstance(left, int) else left
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    lines = []
    for row in (header, *rows):
        cells = (text.ljust(width) if name in named else text.rjust(width) for name, text, width in zip(header, row, widths))
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def table_of(rows: Sequence[Mapping[str, str]], *, left: int | Collection[str] = 1) -> list[str]:
    """Return the lines of a table whose rows map headings to cells. A heading without a cell that says anything is no column."""
    header = list(dict.fromkeys(heading for row in rows for heading in row if any(row.get(heading) for row in rows)))
    return table(header, [[row.get(heading, "") for heading in header] for row in rows], left=left)


def figures(value: float) -> str:
    """Write a number >= 0 with at least three figures and no exponent: `0`, `0.00421`, `1.57`, `25.3`, `141`, `2048`."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(value)))
    return f"{value:.{decimals}f}"


def plain(text: object, longest: int = MOST_CHARACTERS) -> str:
    """Return one line for a terminal: control characters of a file's name or content become `?`."""
    line = " ".join(str(text).split())
    line = line if len(line) <= longest else line[: longest - 3] + "..."
    return "".join(character if character.isprintable() else "?" for character in line)


def gib(size: int | float) -> str:
    return figures(size / GIB)


def ranks_text(ranks: Sequence[int]) -> str:
    """Abbreviate ascending ranks: `0-7`, `0,4`, `0-56 by 8`."""
    steps = {b - a for a, b in zip(ranks, ranks[1:])}
    if len(ranks) > 2 and len(steps) == 1:
        step = steps.pop()
        return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")
    # Along a run of neighbouring ranks the difference of rank and place is constant.
    runs = ([rank for _, rank in run] for _, run in groupby(enumerate(ranks), key=lambda one: one[1] - one[0]))
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def groups_text(groups: Sequence[Sequence[int]]) -> str:
    """Abbreviate groups of ranks: `0-7 | 8-15`; of more than SHOWN_GROUPS the first two and the last."""
    if len(groups) > SHOWN_GROUPS:
        return f"{ranks_text(groups[0])} | {ranks_text(groups[1])} | ... | {ranks_text(groups[-1])} ({len(groups)} groups)"
    return " | ".join(ranks_text(group) for group in groups)
