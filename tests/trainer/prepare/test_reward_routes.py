"""Labels of the data choose among the recipes of the configuration, and are held against them before a model is built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megappo.config.errors import ConfigError
from megappo.config.loading import validated
from megappo.config.reward_sections import RewardConfig
from megappo.data.prompts import Prompt, PromptSet
from megappo.trainer.prepare.reward_notes import answer_notes
from megappo.trainer.prepare.reward_parts import check_requirements, load_parts
from megappo.trainer.prepare.reward_routes import check_labels, recipe_of

MAP = {"gsm8k": [{"name": "gsm8k_strict"}], "code": [{"name": "has_eos"}, {"name": "exact_match", "weight": 2}]}


def routed(recipes: Mapping[str, Any] = MAP) -> RewardConfig:
    return validated({"route": {"key": "meta.source", "map": recipes}}, RewardConfig)


def prompts(*records: tuple[Any, str], name: str = "d.jsonl") -> PromptSet:
    """One prompt per (label, answer)."""
    made = tuple(
        Prompt(f"{name}#{row}", (1,), "?", answer, {"meta": {"source": label}}, row + 1)
        for row, (label, answer) in enumerate(records)
    )
    return PromptSet(made, len(made), 0, 8)


def test_a_label_chooses_its_recipe_and_a_record_without_one_the_default() -> None:
    reward = routed({**MAP, "default": [{"name": "gsm8k_format"}]})
    labels = ["gsm8k", "code", "math", None, 3, {"gsm8k": 1}, "default"]
    assert [recipe_of(reward, {"meta": {"source": label}}) for label in labels] == ["gsm8k", "code", *["default"] * 5]
    assert recipe_of(reward, {"meta": 1}) == recipe_of(reward, {}) == "default"
    assert recipe_of(routed({"3": MAP["code"]}), {"meta": {"source": 3}}) == "3"
    assert recipe_of(RewardConfig(), {"meta": {"source": "gsm8k"}}) == "", "without a route there is one recipe"


def test_labels_without_a_recipe_are_refused_with_counts_and_places() -> None:
    unknown = prompts(("gsm8k", "1"), ("math", "1"), ("math", "1"), (None, "1"), ("code", "1"))
    with pytest.raises(ConfigError) as caught:
        list(check_labels(routed(), {"data.train": unknown}))
    assert str(caught.value) == (
        'reward.route.key = "meta.source": 3 of 5 records of data.train have no recipe: '
        "math: 2 (d.jsonl#1 (line 2), d.jsonl#2 (line 3)); "
        "no label: 1 (d.jsonl#3 (line 4)); recipes: gsm8k, code; add them, or default, to reward.route.map"
    )
    with pytest.raises(ConfigError, match="1 of 1 records of data.eval have no recipe: other: 1"):
        list(check_labels(routed(), {"data.train": prompts(("gsm8k", "1"), ("code", "")), "data.eval": prompts(("other", "1"))}))
    [note] = check_labels(routed({**MAP, "default": [{"name": "has_eos"}]}), {"data.train": unknown})
    assert note.startswith("3 of 5 records of data.train take reward.route.map.default: math: 2 (d.jsonl#1 (line 2)")


def test_a_recipe_that_no_record_has_is_told() -> None:
    [note] = check_labels(routed(), {"data.train": prompts(("gsm8k", "1")), "data.eval": prompts(("gsm8k", "1"))})
    assert note == "data.train: no record has the label code (reward.route.map)"
    assert list(check_labels(RewardConfig(), {"data.train": prompts(("x", "1"))})) == []


def test_answers_and_fields_are_asked_of_the_records_that_a_part_scores(tmp_path: Path) -> None:
    sets = {"data.train": prompts(("gsm8k", "7"), ("gsm8k", "seven"), ("code", "def f"), ("code", " "))}
    [note] = answer_notes(routed(), sets)
    assert note.startswith("data.train: gsm8k_strict cannot read 1 of 2 answers and gives them no score: d.jsonl#1 (line 2);")
    (tmp_path / "mine.py").write_text("def score(s): return 0\nscore.requires = ('answer',)\n")
    own = {"path": str(tmp_path / "mine.py"), "function": "score"}

    def check(label: str) -> None:
        reward = routed({**MAP, label: [own]})
        check_requirements(reward, load_parts(reward), sets)

    check("gsm8k")
    with pytest.raises(ConfigError, match="requires answer, which 1 of 2 records of data.train lack: d.jsonl#3"):
        check("code")


def test_a_part_of_two_recipes_is_loaded_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(s): return 0\n")
    own = {"path": str(tmp_path / "mine.py"), "function": "score"}
    reward = routed({"a": [own, {"name": "has_eos"}], "b": [{"name": "has_eos", "weight": 3}, {**own, "weight": 0}]})
    assert list(load_parts(reward)) == ["mine.score", "has_eos"]
    bad = routed({"a": [{"name": "has_eos"}], "b": [{**own, "function": "scores"}]})
    with pytest.raises(ConfigError, match=r"^reward.route.map.b.0.path = .*defines no scores; its functions: score"):
        load_parts(bad)
