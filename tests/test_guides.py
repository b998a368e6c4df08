"""Statements of the guides in docs/ hold: keys that exist, scores that the rules give, recipes as their files are."""

import re
from pathlib import Path

import pytest

from megappo.config.keys import sections, value_keys
from megappo.config.loading import load_config
from megappo.config.rollout_checks import MAX_REPLAYED_TOP_K
from megappo.config.schema import TrainConfig
from megappo.rewards.base import RewardInput
from megappo.rewards.rules import make_rule
from megappo.rollout.types import SamplingParams
from tests.telemetry.catalogue import metric_of

from .trainer.public_models import PUBLIC

ROOT = Path(__file__).parents[1]
KEYS = {key for key, _ in value_keys(TrainConfig)}
CODE = re.compile(r"`([^`]+)`")


def table_rows(text):
    """Cells of every table row, without headers and rules."""
    rows = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        is_header = number + 1 < len(lines) and lines[number + 1].startswith("|---")
        if line.startswith("| ") and not is_header:
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def unknown_keys(cell):
    """Key-like code in a cell that is no key of megappo's."""
    written = (re.split(r"[ =]", code)[0] for code in CODE.findall(cell))
    return [key for key in written if "." in key and key not in KEYS]


def test_the_comparison_names_keys_of_megappo_that_exist():
    rows = table_rows((ROOT / "docs" / "coming_from.md").read_text())
    assert len(rows) >= 35 and all(len(row) == 4 for row in rows)
    assert [(row[0], unknown_keys(row[0])) for row in rows if unknown_keys(row[0])] == []
    named = {key for row in rows for code in CODE.findall(row[0]) for key in [re.split(r"[ =]", code)[0]] if key in KEYS}
    assert len(named) >= 50
    # Negative control: the other columns are full of names that this check does refuse.
    assert len([row for row in rows if unknown_keys(row[1])]) >= 30


@pytest.mark.parametrize("name", ["gsm8k.md", "agreement.md"])
def test_text_and_examples_of_the_guides_name_keys_that_exist(name):
    heads = {name.split(".")[0] for name, _ in sections(TrainConfig)}
    page = (ROOT / "docs" / name).read_text()
    written = {match for match in re.findall(r"\b([a-z_]+(?:\.[a-z_]+)+)\b(?!/)", page) if match.split(".")[0] in heads}
    assert written and written <= KEYS, written - KEYS
    metrics = set(re.findall(r"`((?:rollout|policy|kl)/[a-z_]+)`", page))
    assert all(metric_of(metric) is not None for metric in metrics)


def test_the_page_on_agreement_states_the_limits_of_the_code():
    page = (ROOT / "docs" / "agreement.md").read_text()
    assert f"1 to {MAX_REPLAYED_TOP_K};" in page and "`top_k + top_k/8 + 16` ids" in page
    width = SamplingParams(1, top_k=50, record_kept=True).kept_width
    assert width == 50 + 50 // 8 + 16 and f"{4 * width} bytes a token with `top_k: 50`" in page


@pytest.mark.parametrize("row", table_rows((ROOT / "docs" / "gsm8k.md").read_text())[:7], ids=lambda row: row[0])
def test_the_table_of_recipes_is_what_the_files_say(row):
    path = ROOT / row[0].strip("`")
    config, text = load_config(path), path.read_text()
    assert int(row[4]) == PUBLIC[path.stem][2]
    assert config.policy.model.startswith(f"./models/{row[1]}")
    memory = re.search(r"of (\d+) GB", text)
    assert memory is not None and row[2] == f"{config.run.num_ranks} x {memory[1]} GB"
    assert row[3] == (layouts(config) if config.run.num_ranks > 1 else "one rank")


def layouts(config):
    def sizes(role):
        tp, pp = role.parallel.tp, role.parallel.pp
        every = {"tp": tp, "pp": pp, "dp": config.run.num_ranks // (tp * pp)}
        return " ".join(f"{name} {size}" for name, size in every.items() if size > 1)

    engine = "" if config.policy.engine == "megatron" else f", {config.policy.engine}"
    return f"{sizes(config.policy)} / {sizes(config.critic)}{engine}"


def test_the_table_of_scores_is_what_the_rules_give():
    page = (ROOT / "docs" / "gsm8k.md").read_text()
    rows = table_rows(page)[7:]
    assert len(rows) == 12
    header = next(line for line in page.splitlines() if line.startswith("| response"))
    rules = [make_rule(name.strip()) for name in header.strip("|").split("|")[1:]]
    for response, *scores in rows:
        text = response.strip("`").replace("\\n", "\n")
        sample = RewardInput(
            prompt="", response=text, answer="#### 72", truncated=False, num_tokens=1, record={}, sample_id=response
        )
        assert [rule(sample) for rule in rules] == [float(score) for score in scores], response
