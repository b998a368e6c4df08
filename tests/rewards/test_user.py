"""Rewards of the user's own code: what they see and may return, and one line for each way in which they fail."""

from __future__ import annotations

import importlib
import re
import sys
from math import nan
from pathlib import Path
from typing import Any

import pytest

from megappo.config.errors import ConfigError
from megappo.config.reward_sections import RewardConfig, RewardPart
from megappo.data.prompts import Prompt, PromptSet
from megappo.rewards.base import PreparedPart, RewardError
from megappo.rewards.compose import Scored
from megappo.rewards.scorer import Scorer
from megappo.rewards.user import OwnRule
from megappo.trainer.prepare.reward_parts import check_requirements, load_parts
from megappo.trainer.sampling import scorer_of
from tests.rewards.samples import sample, scores

SAMPLES = [sample("a b", "a", sample_id="t#0"), sample("c", "c", sample_id="t#1"), sample("", "x", sample_id="t#2")]


def scorer(folder: Path, code: str, **keys: Any) -> Scorer:
    """Scorer of the function `score` of a file with this code."""
    (folder / "mine.py").write_text(code)
    part = RewardPart(**{"path": str(folder / "mine.py"), "function": "score", "weight": 2.0, **keys})
    reward = RewardConfig(parts=(part,))
    return scorer_of(reward, load_parts(reward))


def score(folder: Path, code: str, **keys: Any) -> Scored:
    return scores(scorer(folder, code, **keys), SAMPLES)


def test_a_function_of_one_sample_is_weighed_under_its_own_name(tmp_path: Path) -> None:
    code = "def score(sample, word, scale=1.0):\n    return scale * (word in sample.response)\n"
    found = score(tmp_path, code, args={"word": "a", "scale": 0.5})
    assert found.parts == {"mine.score": [0.5, 0.0, 0.0]} and found.total == [1.0, 0.0, 0.0]
    assert list(score(tmp_path, code, args={"word": "a"}, name="words").parts) == ["words"]


def test_it_imports_modules_beside_it_and_of_the_working_directory_but_no_impostor(tmp_path: Path, monkeypatch) -> None:
    """Also when it is called; a random.py beside it stays a file of its own."""
    (tmp_path / "start" / "rewards").mkdir(parents=True)
    (tmp_path / "start" / "in_the_working_directory.py").write_text("HALF = 0.5\n")
    (tmp_path / "start" / "rewards" / "beside_the_reward.py").write_text("ONE = 1.0\n")
    (tmp_path / "start" / "rewards" / "colorsys.py").write_text("raise SystemExit('the impostor')\n")
    monkeypatch.chdir(tmp_path / "start")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path / "start"))])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    code = (
        "import colorsys\nfrom beside_the_reward import ONE\n"
        "def score(sample):\n    from in_the_working_directory import HALF\n    return ONE + HALF + 0 * colorsys.ONE_THIRD\n"
    )
    (tmp_path / "start" / "rewards" / "mine.py").write_text(code)
    reward = RewardConfig(parts=(RewardPart(path="rewards/mine.py", function="score"),))
    assert scores(scorer_of(reward, load_parts(reward)), SAMPLES).total == [1.5, 1.5, 1.5]


def test_a_batch_is_scored_at_once_and_may_be_numpy(tmp_path: Path) -> None:
    code = "import numpy\ndef score(samples):\n    return numpy.array([len(s.response) for s in samples], dtype=numpy.float32)\n"
    rule = scorer(tmp_path, code, batch=True)
    assert scores(rule, SAMPLES).total == [6.0, 2.0, 0.0]
    assert scores(rule, []).total == [], "a rank without a share calls nothing"


def test_parts_are_logged_and_undecided_and_unusable_samples_have_no_score(tmp_path: Path) -> None:
    code = (
        "from megappo.rewards.base import UnusableAnswer\n"
        "def score(sample):\n"
        "    if not sample.response: return None\n"
        "    if sample.answer == 'c': raise UnusableAnswer('c')\n"
        "    return {'score': 1, 'parts': {'length': len(sample.response), 'spaces': True}}\n"
    )
    found = score(tmp_path, code)
    names = ["mine.score", "mine.score.length", "mine.score.spaces"]
    assert str(found.parts) == str({name: [value, nan, nan] for name, value in zip(names, (1.0, 3.0, 1.0))})
    assert str(found.total) == "[2.0, nan, nan]" and found.no_verdict == ["", "unusable", "undecided"]


@pytest.mark.parametrize("keys", [{}, {"workers": 1}])
def test_own_code_says_that_it_has_no_verdict_and_why(tmp_path: Path, keys: dict) -> None:
    """Any other exception, also of a reason that is no name, is a fault of the code."""
    code = (
        "from megappo.rewards.base import NoVerdict\ndef score(s):\n    if s.response == 'c': raise NoVerdict({!r})\n    return 1\n"
    )
    mine = scorer(tmp_path, code.format("judge.down"), **keys)
    assert scores(mine, SAMPLES).no_verdict == ["", "judge.down", ""]
    mine.close()
    broken = scorer(tmp_path, code.format("judge is down"), **keys)
    with pytest.raises(RewardError, match=r"raised ValueError: NoVerdict\('judge is down'\): .*\(mine.py:3\); sample t#1"):
        scores(broken, SAMPLES)
    broken.close()


def test_a_batch_returns_what_it_has_no_verdict_on(tmp_path: Path) -> None:
    code = "from megappo.rewards.base import NoVerdict\ndef score(samples):\n    return [1, NoVerdict('no_judge'), None]\n"
    assert score(tmp_path, code, batch=True).no_verdict == ["", "no_judge", "undecided"]


def rule_of(part: PreparedPart) -> OwnRule:
    return part.make.__self__


def test_two_rules_of_one_file_share_its_state_and_a_changed_file_is_loaded_anew(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nseen = []\ndef score(s): return 1\nalso = score\n"
    )
    parts = tuple(RewardPart(path=str(file), function=name) for name in ("score", "also"))
    both = load_parts(RewardConfig(parts=parts))
    assert rule_of(both["mine.score"]).call.func is rule_of(both["mine.also"]).call.func
    file.write_text("def score(s): return 2\n")
    again = load_parts(RewardConfig(parts=parts[:1]))
    assert again["mine.score"].sha256 != both["mine.score"].sha256 and rule_of(again["mine.score"]).call(SAMPLES[0]) == 2
    assert not list(tmp_path.glob("**/*.pyc")), "nothing is written beside the user's file"


# code, keys, what the line says
REFUSED = [
    (None, {}, ["reward.parts.0.path", "mine.py", "cannot be read: No such file", "relative to the working directory"]),
    ("def other(s): pass\n", {}, ["defines no score; its functions: other"]),
    ("def score(s):\n  return (\n", {}, ["cannot be imported: SyntaxError", "(line 2)"]),
    ("x = 1\nimport no_such_package\n", {}, ["ModuleNotFoundError: No module named 'no_such_package' (mine.py:2)"]),
    ("def f():\n    return 1 / 0\nf()\n", {}, ["ZeroDivisionError: division by zero (mine.py:2)"]),
    ("import sys\nsys.exit(3)\n", {}, ["SystemExit: 3 (mine.py:2)"]),
    ("def score(): pass\n", {}, ["mine.py: score() cannot be called with one sample: too many positional arguments"]),
    ("def score(s, word): pass\n", {}, ["score(s, word) cannot be called with one sample: missing", "'word'"]),
    ("def score(s): pass\n", {"args": {"word": 1}}, ["with one sample and args word: got an unexpected keyword argument 'word'"]),
    ("def score(): pass\n", {"batch": True}, ["with a list of samples"]),
    ("score = 3\n", {}, ["mine.py: score is int, not a function"]),
    ("class score:\n    def __init__(self, s): pass\n", {}, ["score is a class, not a function"]),
    ("async def score(s): pass\n", {}, ["is a coroutine or a generator"]),
    ("def score(s): yield 1\n", {}, ["is a coroutine or a generator"]),
    ("def score(s): pass\nscore.requires = 'answer'\n", {}, ["score.requires is 'answer', not a tuple of names"]),
    ("def score(s): pass\n", {"name": "score"}, ['reward.parts.0.name = "score"', "set name to another"]),
    ("def score(s): pass\n", {"name": "exact_match"}, ["no built-in rule"]),
    ("def score(s): pass\n", {"name": "length_penalty"}, ["no built-in rule or metric"]),
    ("def score(s): pass\n", {"name": "a b"}, ["letters, digits"]),
]


@pytest.mark.parametrize("code, keys, says", REFUSED)
def test_code_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, code: str | None, keys: dict, says: list[str]) -> None:
    if code is not None:
        (tmp_path / "mine.py").write_text(code)
    part = RewardPart(**{"path": str(tmp_path / "mine.py"), "function": "score", **keys})
    with pytest.raises(ConfigError) as caught:
        load_parts(RewardConfig(parts=(part,)))
    assert "\n" not in str(caught.value) and all(text in str(caught.value) for text in says), caught.value


# what the function returns (or does) for the sample t#1, keys, what the error says
FAILING = [
    ("float('nan')", {}, ["returned nan, not a finite number", "sample t#1"]),
    ("float('inf')", {}, ["returned inf, not a finite number"]),
    ("'1'", {}, ["returned '1', not a finite number"]),
    ("[1]", {}, ["returned [1], not a finite number"]),
    ("1 / 0", {}, ["raised ZeroDivisionError: division by zero (mine.py:2)", "sample t#1"]),
    ("exit()", {}, ["raised SystemExit"]),
    ("{'parts': {}}", {}, ["not score (a number), parts (a mapping) and per_token (a list)", "sample t#1"]),
    ("{'score': 1, 'part': {}}", {}, ["not score (a number), parts (a mapping) and per_token (a list)"]),
    ("{'score': float('nan')}", {}, ["returned the score nan, not a finite number"]),
    ("{'score': 1, 'parts': {'a': None}}", {}, ["returned for a None, not a finite number"]),
    ("{'score': 1, 'parts': {'a b': 1}}", {}, ["named a part 'a b'"]),
    ("{'score': 1, 'parts': {'per_token': 1}}", {}, ["named a part 'per_token': that is the name of the tokens' sum"]),
    ("{'per_token': [1]}", {}, ["not score (a number), parts (a mapping) and per_token (a list)"]),
    ("{'score': 1, 'per_token': [1, 2]}", {}, ["returned per_token with 2 rewards for 1 sampled tokens", "sample t#1"]),
    ("{'score': 1, 'per_token': []}", {}, ["returned per_token with 0 rewards for 1 sampled tokens", "sample t#1"]),
    ("{'score': 1, 'per_token': 1}", {}, ["returned per_token 1, not a list of numbers"]),
    (
        "{'score': 1, 'per_token': [float('nan')]}",
        {},
        ["returned in per_token, at token 0, nan, not a finite number", "sample t#1"],
    ),
]
BATCHES = [
    ("[1, 2]", ["returned 2 results for 3 samples, the first: sample t#0"]),
    ("{0: 1}", ["returned dict, no list, for 3 samples"]),
    ("'abc'", ["returned str, no list, for 3 samples"]),
    ("[0, 0, float('nan')]", ["returned nan, not a finite number; sample t#2"]),
    ("samples[7]", ["raised IndexError: list index out of range (mine.py:2); 3 samples, the first: sample t#0"]),
]


@pytest.mark.parametrize("value, keys, says", FAILING)
def test_a_score_that_is_none_names_rule_and_sample(tmp_path: Path, value: str, keys: dict, says: list[str]) -> None:
    with pytest.raises(RewardError) as caught:
        score(tmp_path, f"def score(s):\n    return {value} if s.sample_id == 't#1' else 1\n", **keys)
    assert all(text in str(caught.value) for text in ["reward rule mine.score", *says]), caught.value


@pytest.mark.parametrize("value, says", BATCHES)
def test_a_batch_that_is_none_names_rule_and_samples(tmp_path: Path, value: str, says: list[str]) -> None:
    with pytest.raises(RewardError) as caught:
        score(tmp_path, f"def score(samples):\n    return {value}\n", batch=True)
    assert all(text in str(caught.value) for text in ["reward rule mine.score", *says]), caught.value


def test_fields_that_a_rule_requires_are_looked_for_in_all_records(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(s): return 0\nscore.requires = ('answer', 'meta.tests')\n")
    reward = RewardConfig(parts=(RewardPart(path=str(tmp_path / "mine.py"), function="score"),))
    rules = load_parts(reward)

    def check(*records: tuple[str, dict]) -> None:
        prompts = tuple(Prompt(f"f#{row}", (1,), "q", answer, record, row + 1) for row, (answer, record) in enumerate(records))
        check_requirements(reward, rules, {"data.train": PromptSet(prompts, len(prompts), 0, 8)})

    whole = ("1", {"meta": {"tests": ["x"]}})
    check(whole)
    with pytest.raises(
        ConfigError,
        match=re.escape('reward.parts = "mine.score": requires answer, which 1 of 2 records of data.train lack: f#1 (line 2)'),
    ):
        check(whole, (" ", whole[1]))
    with pytest.raises(ConfigError, match="requires meta.tests, which 2 of 3 records"):
        check(whole, ("1", {"meta": {}}), ("1", {"meta": {"tests": None}}))


def test_an_entry_point_of_an_installed_package_is_a_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("def brief(sample, limit):\n    return float(len(sample.response) < limit)\n")
    (tmp_path / "my_broken.py").write_text("import no_such_package\n")
    info = tmp_path / "my_rewards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-rewards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[megappo.rewards]\nbrief = my_rewards:brief\nbroken = my_broken:score\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()

    def load(**keys: Any) -> Any:
        return load_parts(RewardConfig(parts=(RewardPart(**keys),)))

    rules = load(entry_point="brief", args={"limit": 2})
    brief = scorer_of(RewardConfig(parts=(RewardPart(entry_point="brief", args={"limit": 2}),)), rules)
    assert scores(brief, SAMPLES).total == [0.0, 1.0, 1.0]
    assert len(rules["brief"].sha256) == 64
    for keys, says in (
        (
            {"entry_point": "brif"},
            "no installed package has this entry point in the group megappo.rewards; installed: brief, broken",
        ),
        ({"entry_point": "broken"}, "my_broken:score cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        ({"entry_point": "brief"}, "my_rewards:brief(sample, limit) cannot be called with one sample: missing"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(**keys)
        assert says in str(caught.value) and "\n" not in str(caught.value)
