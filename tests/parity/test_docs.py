"""docs/parity.md is about the matrix that the tests run: every layout and mistake has its row, and no other has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.parity.faults import FAULTS
from tests.parity.matrix import MODELS, RUN_TOGETHER, VARIED, title
from tests.parity.page import COLUMNS, short
from tests.parity.replay import REPLAYED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"


def section(heading: str) -> str:
    return PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]


def tables(text: str) -> list[list[list[str]]]:
    """Cells of each table, the head first; the rule begins with no blank."""
    blocks = (block.splitlines() for block in text.split("\n\n") if block.strip().startswith("| "))
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in block if line.startswith("| ")] for block in blocks]


def keys(rows: Sequence[Sequence[str]], count: int) -> list[tuple[str, ...]]:
    return [tuple(row[:count]) for row in rows]


def of(table: dict, smallest: int = 1) -> list[tuple[str, str]]:
    return [
        (model, short(title(case, size)))
        for model, sizes in table.items()
        for size, cases in sizes.items()
        for case in cases
        if size >= smallest
    ]


def test_the_page_shows_every_layout_of_the_matrix() -> None:
    by_model = section("The matrix").split("### ")[1:]
    shown = [(text.splitlines()[0], layout) for text in by_model for (layout,) in keys(tables(text)[0][1:], 1)]
    assert shown == of(MODELS) and len(set(shown)) == len(shown), "a short name is of one layout"


def test_the_page_shows_every_variant_replay_and_mistake() -> None:
    (head, *rows), (head_of_bf16, *rows_of_bf16) = tables(section("Micro-batches, recompute, offload, bf16"))
    assert {*head[2:], "bf16"} == set(RUN_TOGETHER) and tuple(head_of_bf16[2:]) == COLUMNS
    assert keys(rows, 2) == keys(rows_of_bf16, 2) == of(VARIED)
    assert all(len(row) == len(head) and all(row) for row in rows)
    assert keys(tables(section("Twenty steps"))[0][1:], 2) == of(REPLAYED, smallest=2)
    assert keys(tables(section("What would be noticed"))[0][1:], 1) == [(fault,) for fault in FAULTS]


def test_the_page_is_the_filled_template() -> None:
    template = (Path(__file__).parent / "parity.md.in").read_text(encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    prose = [line for line in template.splitlines() if line.strip() and "{{" not in line]
    assert [line for line in prose if line not in page] == []
    assert "{{" not in page
