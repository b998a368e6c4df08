"""docs/evaluation.md: its configuration loads and passes the checks, its gates are gates, and its metrics exist."""

from __future__ import annotations

import re
from pathlib import Path

from megappo.commands.gate.gates import parse_gate
from megappo.config.checks import problems
from megappo.config.evaluations import best_metric, metric_names
from megappo.config.loading import explicit_keys, load_config

PAGE = (Path(__file__).parents[1] / "docs" / "evaluation.md").read_text()


def block(start: str) -> str:
    """Indented block of the page that begins with this line, without its indentation."""
    found = re.search(rf"^    {re.escape(start)}\n(?:    .*\n)*", PAGE, re.MULTILINE)
    assert found is not None, start
    return re.sub(r"^    ", "", found[0], flags=re.MULTILINE)


def test_the_configuration_of_the_guide_loads_and_passes(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("policy: {model: m}\ndata: {train: t.jsonl, eval: e.jsonl}\n" + block("evaluations:"))
    config = load_config(path)
    assert list(problems(config, explicit_keys(config), 1)) == []
    assert best_metric(config) == "eval/math/pass@8" and "eval/gsm8k/mean@1" in metric_names(config)


def test_the_gates_of_the_guide_are_gates():
    lines = [line.removeprefix("- ") for line in block("- reward/score_mean > 0.75 at 40").splitlines()]
    assert len([parse_gate(line, "guide") for line in lines]) == 4
