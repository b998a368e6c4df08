"""The table of rules, exact match and has_eos."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from megappo.rewards import math_forms, symbolic, symbolic_worker
from megappo.rewards.rules import RULES, exact_match, has_eos, hash_of_code, make_rule
from tests.rewards.samples import sample

TABLE = [
    ("46", "46", 1),
    (" 46\n", "46", 1),
    ("the  red\n house", "the red house", 1),
    ("\uff14\uff16", "46", 1),  # full-width digits are the same under NFKC
    ("e\u0301", "\u00e9", 1),
    ("46", "4 6", 0),
    ("46.", "46", 0),
    ("The answer is 46", "46", 0),
    ("Yes", "yes", 0),
    ("", "46", 0),
    ("", "", 1),
]


@pytest.mark.parametrize("response, answer, expected", TABLE)
def test_exact_match_compares_the_whole_normalised_response(response: str, answer: str, expected: int) -> None:
    assert exact_match(sample(response, answer)) == expected


def test_has_eos_is_0_for_a_cut_response() -> None:
    assert [has_eos(sample("x", truncated=t)) for t in (False, True)] == [1.0, 0.0]


def test_every_rule_of_the_table_tells_right_from_wrong() -> None:
    """Each rule gives 1 for one of these responses and 0 for another: none is constant."""
    responses = [sample("#### 72", "#### 72"), sample("no", "#### 72", truncated=True)]
    for name in RULES:
        rule = make_rule(name)
        assert {rule(s) for s in responses} == {0.0, 1.0}, name


@pytest.mark.parametrize(
    "name, hint",
    [
        ("exactmatch", "did you mean exact_match? Rules: exact_match, gsm8k_strict"),
        ("math-verify", "did you mean math_verify? "),
        ("zzz", "there is no rule 'zzz'; Rules: exact_match"),
    ],
)
def test_an_unknown_rule_gives_the_nearest_and_the_list(name: str, hint: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_rule(name)
    assert hint in str(caught.value) and "\n" not in str(caught.value)
    assert all(known in str(caught.value) for known in RULES)


def test_math_verify_says_how_to_install_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"reward.parts: math_verify needs the math-verify package: pip install"):
        make_rule("math_verify")


def test_the_hash_of_math_verify_is_of_all_that_decides_its_scores() -> None:
    files = (symbolic, math_forms, symbolic_worker)
    content = b"".join(Path(module.__file__).read_bytes() for module in files)
    assert hash_of_code("math_verify") == hashlib.sha256(content).hexdigest()
    assert hash_of_code("exact_match") == hash_of_code("has_eos") != hash_of_code("gsm8k_strict")
