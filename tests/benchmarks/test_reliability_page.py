"""docs/reliability.md: every row of the specification is there, names tests that exist, and the page is the script's."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks.reliability import page
from benchmarks.reliability.promises import PROMISES

KEYS = [f"R{n}" for n in range(1, 8)] + [f"F{n}" for n in range(1, 18)] + ["P1", "P2"] + [f"S{n}" for n in range(1, 13)]


def test_every_row_of_the_specification_has_one_promise():
    assert [promise.key for promise in PROMISES] == KEYS


def test_a_promise_has_tests_that_exist_or_says_why_not():
    for promise in PROMISES:
        assert page.missing_tests(promise) == []
        assert promise.tests or promise.not_covered or promise.figure


def test_a_test_that_does_not_exist_is_noticed():
    promise = dataclasses.replace(PROMISES[0], tests=("tests/absent.py::test_a", "tests/commands/test_cli.py::test_absent"))
    assert page.missing_tests(promise) == list(promise.tests)


def test_the_page_is_the_template_with_the_stored_figures():
    figures = json.loads(page.FIGURES.read_text("utf-8"))
    template = page.TEMPLATE.read_text("utf-8")
    assert page.PAGE.read_text("utf-8") == page.render(template, figures)
    figures["goodput"]["ettr"] /= 2
    assert page.PAGE.read_text("utf-8") != page.render(template, figures), "a changed figure makes the page stale"


def test_the_figures_of_the_page_hold_the_specification():
    figures = json.loads(page.FIGURES.read_text("utf-8"))
    for name in ("kills", "all"):
        assert figures[name]["equal"] and len(figures[name]["faults"]) == 10
    for outcome in page.outcomes(figures["kills"]):
        assert outcome.detected_s <= 2 and outcome.recovered_s <= 30
    assert figures["all"]["faulty_s"] <= figures["all"]["clean_s"] + 10 * 35
    assert figures["goodput"]["ettr"] >= 0.9
    # Where the disk takes a save as fast as memory would, the copy itself is more than the share of a save that is allowed.
    # The fastest of all: medians are those of a machine that others used too.
    fastest = figures["saves"]["fastest"]
    assert fastest["stall"] <= max(0.05 * fastest["sync"], 3 * fastest["copy"])


def test_a_name_that_is_no_figure_is_an_error():
    with pytest.raises(ValueError, match="the template asks for speed, which is no figure"):
        page.render("{{machine}} {{speed}}", json.loads(page.FIGURES.read_text("utf-8")))
