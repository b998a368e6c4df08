"""Tables with numbers to the right, names to the left, and a last column of any length."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str]) -> list[str]:
    """Align columns, two blanks in front. left: headings of the columns that begin on the left."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header) - 1)]
    lines = []
    for row in [header, *rows]:
        cells = [text.ljust(width) if name in left else text.rjust(width) for name, text, width in zip(header, row, widths)]
        lines.append(("  " + "  ".join([*cells, row[-1]])).rstrip())
    return lines
