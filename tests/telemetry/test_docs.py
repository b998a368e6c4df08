"""docs/metrics.md is the page that the catalogue generates."""

from pathlib import Path

from megappo.commands import docs_metrics
from megappo.telemetry.metrics import GROUPS, Metric

ROOT = Path(__file__).parents[2]


def test_the_committed_page_is_current():
    assert (ROOT / docs_metrics.PAGE).read_text() == docs_metrics.page(), "run: python -m megappo.commands.docs_metrics"


def test_every_metric_has_one_row_with_a_meaning():
    page = docs_metrics.page()
    assert all(
        page.count(f"\n| `{metric.value}` | {docs_metrics.cell(metric.meaning)} |\n") == 1 and metric.meaning for metric in Metric
    )
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == list(GROUPS)


def test_a_bar_ends_no_cell():
    row = next(line for line in docs_metrics.page().splitlines() if line.startswith("| `critic/value_error_max`"))
    assert row.endswith(r"| largest \|value - return\| |")
