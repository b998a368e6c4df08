"""Statements of the guides in docs/ hold: keys that exist, scores that the rules give, recipes as their files are."""

import re
from pathlib import Path

import pytest

from megappo.config.foreign.tables import exact_rule
from megappo.config.keys import sections, value_keys
from megappo.config.loading import load_config
from megappo.config.rollout_checks import MAX_REPLAYED_TOP_K
from megappo.config.schema import TrainConfig
from megappo.config.supervised import KINDS
from megappo.rewards.base import RewardInput
from megappo.rewards.rules import make_rule
from megappo.rollout.types import SamplingParams
from megappo.telemetry.metrics import GROUPS, Distribution, Metric
from tests.telemetry.catalogue import metric_of
from tests.trainer.public_models import PUBLIC

ROOT = Path(__file__).parents[1]
KEYS = {key for cls in (TrainConfig, *KINDS.values()) for key, _ in value_keys(cls)}
SECTIONS = {name for cls in (TrainConfig, *KINDS.values()) for name, _ in sections(cls)}
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


def wrong_names(text):
    """Keys and metrics in code of a page that megappo does not have. A key of another trainer is none of these."""
    heads = {name.split(".")[0] for name in SECTIONS}
    wrong = []
    for code in CODE.findall(text):
        key = re.split(r"[ =:]", code)[0]
        is_key = re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", key) and key.split(".")[0] in heads
        is_vllms = key.startswith("rollout.vllm_args.")  # which names there are, megappo.config.vllm_args knows
        if is_key and not is_vllms and key not in KEYS | SECTIONS and exact_rule(key) is None:
            wrong.append(key)
        metric = re.fullmatch(r"([a-z_]+)/[A-Za-z0-9_@/*]+", code)
        if metric and metric[1] in GROUPS and not is_logged(code):
            wrong.append(code)
    return wrong


def is_logged(name):
    """True for a metric, a histogram, and for `beginning*` if one begins so."""
    beginning = name.removesuffix("*")
    every = [*Metric, *Distribution]
    return metric_of(name) is not None or name in every or (beginning != name and any(m.startswith(beginning) for m in every))


# A key of verl that `megappo convert` does not know, of a draft of T-PPO. And modules.
ELSEWHERE = {"data.window_response_length", "rollout/vllm*"}


def test_guides_name_keys_and_metrics_that_exist():
    for page in sorted((ROOT / "docs").glob("*.md")):
        if page.name != "coming_from.md":  # whose other columns are full of others; its first one is held above
            assert set(wrong_names(page.read_text())) <= ELSEWHERE


def test_wrong_names_are_found():
    text = "`policy.parallel.tpp=2`, `critic/lost`, `kl/per_tokens*`"
    others = "`policy.parallel.tp=2`, `critic.optim.lr`, `critic/l*`, `kl/token`"
    assert wrong_names(f"{text} and {others}") == ["policy.parallel.tpp", "critic/lost", "kl/per_tokens*"]


def test_troubleshooting_quotes_messages_that_exist():
    rows = table_rows((ROOT / "docs" / "troubleshooting.md").read_text())
    code = "".join(path.read_text() for path in (ROOT / "megappo").rglob("*.py"))
    quoted = [part for row in rows for cell in CODE.findall(row[0]) if " " in cell for part in re.split(r"\.\.\.", cell)]
    parts = [part.strip(" ;:?") for part in quoted if part.strip(" ;:?")]
    assert len(parts) >= 5 and [part for part in parts if part not in code] == []


def test_the_page_on_agreement_states_the_limits_of_the_code():
    page = (ROOT / "docs" / "agreement.md").read_text()
    assert f"1 to {MAX_REPLAYED_TOP_K};" in page and "`top_k + top_k/8 + 16` ids" in page
    width = SamplingParams(1, top_k=50, record_top_k_ids=True).top_k_width
    assert width == 50 + 50 // 8 + 16 and f"{4 * width} bytes a token with `top_k: 50`" in page


@pytest.mark.parametrize("row", table_rows((ROOT / "docs" / "gsm8k.md").read_text())[:7], ids=lambda row: row[0])
def test_the_table_of_recipes_is_what_the_files_say(row):
    path = ROOT / row[0].strip("`")
    config, text = load_config(path), path.read_text()
    assert int(row[4]) == PUBLIC[path.stem][2]
    assert config.policy.model.startswith(f"./models/{row[1]}")
    memory = re.search(r"of (\d+) GB", text)
    assert memory is not None and row[2] == f"{config.run.num_ranks} x {memory[1]} GB"
    assert config.run.num_ranks is not None and row[3] == (layouts(config) if config.run.num_ranks > 1 else "one rank")


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
