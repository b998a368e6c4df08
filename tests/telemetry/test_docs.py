"""docs/metrics.md is the page that the catalogue generates."""

from pathlib import Path

from megappo.telemetry.metrics import GROUPS, Metric
from scripts import reference_pages

ROOT = Path(__file__).parents[2]


def test_the_committed_page_is_current():
    assert (ROOT / "docs" / "metrics.md").read_text() == reference_pages.metrics_page(), "run: python scripts/reference_pages.py"


def test_every_metric_has_one_row_with_a_meaning():
    page = reference_pages.metrics_page()
    assert all(
        page.count(f"\n| `{metric.value}` | {reference_pages.cell(metric.meaning)} |\n") == 1 and metric.meaning
        for metric in Metric
    )
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == list(GROUPS)


def test_a_bar_ends_no_cell():
    row = next(line for line in reference_pages.metrics_page().splitlines() if line.startswith("| `critic/value_error_max`"))
    assert row.endswith(r"| largest \|value - return\| |")
