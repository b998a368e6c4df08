"""docs/parity.md is about the matrix that the tests run: every layout and mistake has its row, and no other has."""

from __future__ import annotations

from pathlib import Path

from tests.parity.faults import FAULTS
from tests.parity.matrix import MODELS, VARIANTS, VARIED, title
from tests.parity.replay import REPLAYED

ROOT = Path(__file__).resolve().parents[2]
# Sections of the page -> how many leading cells identify a row.
SECTIONS = {"The matrix": 3, "Micro-batches, recompute, offload, bf16": 4, "Twenty steps": 3, "What would be noticed": 1}


def rows(section: str) -> set[tuple[str, ...]]:
    """Leading cells of the table under a heading, without its head."""
    text = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    table = [line for line in text.splitlines() if line.startswith("| ")][2:]
    return {tuple(cell.strip() for cell in line.strip("|").split("|"))[: SECTIONS[section]] for line in table}


def of(table: dict, smallest: int = 1) -> set[tuple[str, ...]]:
    return {
        (model, str(size), title(case, size))
        for model, sizes in table.items()
        for size, cases in sizes.items()
        for case in cases
        if size >= smallest
    }


def test_the_page_shows_every_layout_of_the_matrix() -> None:
    assert rows("The matrix") == of(MODELS)


def test_the_page_shows_every_variant_replay_and_mistake() -> None:
    assert rows("Micro-batches, recompute, offload, bf16") == {(*row, v) for row in of(VARIED) for v in VARIANTS}
    assert rows("Twenty steps") == of(REPLAYED, smallest=2)
    assert rows("What would be noticed") == {(fault,) for fault in FAULTS}


def test_the_page_is_the_filled_template() -> None:
    template = (ROOT / "tests" / "parity" / "parity.md.in").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    prose = [line for line in template.splitlines() if line.strip() and "{{" not in line]
    assert [line for line in prose if line not in page] == []
    assert "{{" not in page
