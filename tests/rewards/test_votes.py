"""Final answers as votes: two responses vote alike if the rule would hold their answers equal."""

from __future__ import annotations

import os
import signal

import pytest

from megappo.rewards import votes
from megappo.rewards.rules import RULES
from megappo.rewards.symbolic import MathVerify
from megappo.rewards.votes import VOTING, answers_of, voting_rule
from tests.rewards.samples import sample

# rule -> groups of responses: equal within a group, different between groups; then responses without an answer
CASES = {
    "exact_match": ([["4", " 4\n", "４"], ["four"], ["4."]], []),
    "gsm8k_strict": ([["so 2+2\n#### 4", "#### 4.00", "no\n#### 3\n#### $4"], ["#### 5"], ["#### -4"]], ["the answer is 4", ""]),
    "gsm8k_flexible": ([["4", "it is 4.0 apples", "3 and then 4"], ["1,004"]], ["none", ""]),
    "math_verify": (
        [
            [r"\boxed{\frac{1}{2}}", "#### 0.5", r"the answer is $\frac{2}{4}$"],
            [r"\boxed{x+1}", r"\boxed{1+x}"],
            [r"\boxed{(1,2)}"],
            [r"\boxed{2}"],
        ],
        ["", "I do not know"],
    ),
}


@pytest.mark.parametrize("rule", CASES)
def test_equal_answers_have_one_class_and_different_ones_different(rule):
    groups, silent = CASES[rule]
    texts = [text for group in groups for text in group] + silent
    (answers,) = answers_of(rule, [texts])
    assert answers is not None
    classes = iter(answers)
    found = [[next(classes) for _ in group] for group in groups]
    assert all(len(set(one)) == 1 and one[0] is not None for one in found)
    assert len({one[0] for one in found}) == len(groups)
    assert list(classes) == [None] * len(silent)


GOLDS = {
    "exact_match": ["4", "four", "4."],
    "gsm8k_strict": ["4", "5", "-4"],
    "gsm8k_flexible": ["4", "1004"],
    "math_verify": ["1/2", "x+1", "(1,2)", "2"],
}


@pytest.mark.parametrize("rule", CASES)
def test_a_class_is_what_the_rule_itself_scores_alike(rule):
    """Oracle: the rule, with the answer of each group as the reference answer."""
    groups, silent = CASES[rule]
    judge = RULES[rule]()
    for number, gold in enumerate(GOLDS[rule]):
        scores = [[judge(sample(text, gold)) for text in group] for group in [*groups, silent]]
        assert scores == [[float(other == number)] * len(group) for other, group in enumerate([*groups, silent])], gold


@pytest.mark.slow
def test_an_answer_that_takes_for_ever_is_no_vote_and_is_said(caplog, monkeypatch):
    monkeypatch.setattr(votes, "MathVerify", lambda: MathVerify(cpu_limit_s=1.0))
    answers = answers_of("math_verify", [[r"\boxed{9^{9^{9^9}}}", r"\boxed{4}"], [r"\boxed{4}", "#### 4"]])
    assert answers == [None, [0, 0]]
    assert "no decision on the answers of a prompt within 1 s; it has no majority" in caplog.text


def test_a_worker_that_dies_over_a_prompt_leaves_the_others_their_votes(caplog, monkeypatch):
    plain = MathVerify.classes

    def classes(self, responses):
        if "die" in responses:
            plain(self, [r"\boxed{4}"])
            os.kill(self._worker.pid, signal.SIGKILL)
        return plain(self, responses)

    monkeypatch.setattr(MathVerify, "classes", classes)
    assert answers_of("math_verify", [["die", "#### 4"], [r"\boxed{4}", "#### 4"]]) == [None, [0, 0]]
    assert "the math_verify worker was ended by SIGKILL" in caplog.text and "a prompt has no majority" in caplog.text


def test_the_first_part_that_names_answers_counts_the_votes():
    assert voting_rule(["has_eos", "gsm8k_format", "gsm8k_strict", "math_verify"]) == "gsm8k_strict"
    assert voting_rule(["has_eos", "mine.score"]) is None
    assert set(VOTING) <= set(RULES)
