"""Composition of rules: weights, penalties, parts for the logs, and a rule that fails stops everything."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megappo.config.reward_sections import LengthPenaltyConfig
from megappo.rewards.base import NoVerdict, RewardError, RewardInput
from megappo.rewards.compose import Scored, joined
from megappo.rewards.inline import InlinePart
from megappo.rewards.symbolic import MathVerify
from megappo.rewards.verdict import Verdict
from tests.rewards.samples import sample, scorer_with, scores
from tests.trainer.experiences import part_means

SAMPLES = [
    sample("#### 72", "#### 72", num_tokens=5),
    sample("#### 71", "#### 72", num_tokens=10),
    sample("#### 72", "#### 72", truncated=True, num_tokens=14),
]


def test_the_total_is_the_weighted_sum_less_the_penalties() -> None:
    """By hand: strict 1, 0, 1; format 1, 1, 1; eos penalty 0, 0, 0.5; tokens beyond 8: 0, 2, 6."""
    penalty = LengthPenaltyConfig(per_token=0.125, start=8)
    found = scores(scorer_with({"gsm8k_strict": 2.0, "gsm8k_format": 0.25, "exact_match": 0.0}, {}, 0.5, penalty), SAMPLES)
    assert found.total == [2.25, 0.25 - 0.25, 2.25 - 0.5 - 0.75]
    assert found.parts == {
        "gsm8k_strict": [1, 0, 1],
        "gsm8k_format": [1, 1, 1],
        "exact_match": [1, 0, 1],
        "missing_eos_penalty": [0, 0, -0.5],
        "length_penalty": [0, -0.25, -0.75],
    } and (found.no_verdict, found.labels, found.per_token) == ([], [], None)
    assert part_means(found)["length_penalty"] == pytest.approx(-1 / 3)


def test_scores_are_numbers_of_fp32() -> None:
    found = scores(scorer_with({"tenth": 1.0}, {"tenth": lambda s: 0.1}), SAMPLES[:1])
    assert found.total == found.parts["tenth"] == [0.10000000149011612]


def test_penalties_of_0_have_no_part() -> None:
    assert list(scores(scorer_with({"has_eos": 1.0}), SAMPLES).parts) == ["has_eos"]


def test_an_empty_batch_has_empty_scores() -> None:
    found = scores(scorer_with({"has_eos": 1.0}, {}, 1.0), [])
    assert found.total == [] and found.parts["has_eos"] == [] and part_means(found) == {}


def without_score(found: Scored) -> list[str]:
    """Reasons, by which total and parts of such samples are NaN and no others."""
    assert [math.isnan(total) for total in found.total] == [bool(reason) for reason in found.no_verdict]
    return found.no_verdict


def test_undecided_samples_have_no_score_per_call() -> None:
    rule = MathVerify(cpu_limit_s=0.8)
    scorer = scorer_with({"math_verify": 1.0}, {"math_verify": InlinePart("math_verify", rule, close=rule.close)})
    found = scores(scorer, [sample("$10^{10^{10}}$", "5"), sample("5", "5")])
    assert without_score(found) == ["undecided", ""] and found.total[1] == 1.0
    assert scores(scorer, [sample("5", "5")]).no_verdict == []
    assert rule._worker.pid is not None
    scorer.close()
    assert rule._worker.pid is None


def raises(given: RewardInput) -> float:
    raise KeyError("gold")


@pytest.mark.parametrize(
    "rule, says",
    [
        (raises, "reward rule mine raised KeyError: 'gold'; sample t#41, response 'yyy"),
        (lambda s: math.nan, "reward rule mine returned nan, not a finite number; sample t#41"),
        (lambda s: -math.inf, "returned -inf, not a finite number; sample t#41"),
        (lambda s: 1e39, "returned 1e+39, not a finite number; sample t#41"),  # infinite in fp32
        (lambda s: 10**400, "not a finite number; sample t#41"),  # no float at all
        (lambda s: "1", "returned '1', not a finite number; sample t#41"),
    ],
)
def test_a_rule_that_fails_names_sample_rule_and_response(rule, says: str) -> None:
    scorer = scorer_with({"mine": 1.0}, {"mine": lambda s: 1.0 if s.response == "good" else rule(s)})
    assert scores(scorer, [sample("good")]).total == [1.0]
    with pytest.raises(RewardError) as caught:
        scores(scorer, [sample("good"), sample("y" * 500, sample_id="t#41")])
    assert says in str(caught.value)
    assert "y" * 200 in str(caught.value) and "y" * 201 not in str(caught.value)
    assert scores(scorer, [sample("good")]).total == [1.0], "nothing is left of the step that failed"


def test_a_sum_that_overflows_names_the_sample() -> None:
    with pytest.raises(RewardError, match=r"add up to 6e\+38, which fp32 does not hold; sample t#41"):
        scores(scorer_with({"a": 1.0, "b": 1.0}, {"a": lambda s: 3e38, "b": lambda s: 3e38}), [sample("x", sample_id="t#41")])


def test_an_answer_that_a_rule_cannot_read_gives_no_score() -> None:
    """It may come after hours, and again after every resume: it must not end the run."""
    samples = [sample("#### 70", "seventy"), sample("#### 70", "70"), sample("#### 70", "")]
    scorer = scorer_with({"gsm8k_strict": 1.0, "math_verify": 1.0, "has_eos": 0.5})
    found = scores(scorer, samples)
    scorer.close()
    assert without_score(found) == ["unusable", "", "unusable"] and found.total[1] == 2.5
    assert found.parts["math_verify"][0] == 0.0 and math.isnan(found.parts["math_verify"][2])  # it reads `seventy` as a text
    assert found.parts["has_eos"] == [1, 1, 1], "other parts judge as ever"


def test_the_first_reason_of_the_recipe_counts_and_a_part_that_is_only_logged_has_none() -> None:
    """And a sample that all parts judge has the bits that it has alone."""

    def broken(given: RewardInput) -> float:
        raise NoVerdict("judge_down")

    parts = {"logged": broken, "tenth": lambda s: 0.1, "mine": lambda s: None if s.response == "a" else 0.2, "last": broken}
    samples = [sample("a"), sample("b")]
    assert without_score(scores(scorer_with({"mine": 1.0, "last": 1.0}, parts), samples)) == ["undecided", "judge_down"]
    found = scores(scorer_with({"logged": 0.0, "tenth": 0.3, "mine": 1.0}, parts), samples)
    assert without_score(found) == ["undecided", ""]
    assert found.total[1] == scores(scorer_with({"tenth": 0.3, "mine": 1.0}, parts), samples[1:]).total[0]


@pytest.mark.parametrize("reason", ["", "a b", "x" * 65, "a/b", None])
def test_a_reason_is_the_name_of_a_metric(reason: Any) -> None:
    with pytest.raises(ValueError, match="its reason names a metric; use letters, digits and"):
        NoVerdict(reason)


def test_samples_without_a_score_keep_it_through_selections_and_rounds() -> None:
    scorer = scorer_with({"mine": 1.0}, {"mine": lambda s: None if s.response == "a" else 1})
    one, other = (scores(scorer, [sample(text) for text in texts]) for texts in ("ab", "bb"))
    assert joined([one, other]).no_verdict == ["undecided", "", "", ""] and joined([other, other]).no_verdict == []
    assert one.select([1]).no_verdict == [] and one.select([1, 0]).no_verdict == ["", "undecided"]
    assert one.among([True, False, True]).no_verdict == ["undecided", "", ""]
    assert without_score(one.without({1: "died"})) == ["undecided", "died"]


def test_values_of_models_are_weighed_beside_the_rules() -> None:
    scorer = scorer_with({"model": 0.5, "has_eos": 1.0}, {"model": lambda s: 7.0})  # its own value counts, no rule's
    verdicts = {0: Verdict(2.0, {"raw": 5.0}), 1: Verdict(-4.0, {"raw": 6.0})}
    found = scores(scorer, SAMPLES[:2], {"model": verdicts})
    assert found.total == [2.0, -1.0]
    assert found.parts == {"model": [2.0, -4.0], "has_eos": [1.0, 1.0], "model.raw": [5.0, 6.0]}
    with pytest.raises(RewardError, match="reward part model gave nan, not a finite number; sample t#0"):
        scores(scorer, SAMPLES[:1], {"model": {0: Verdict(math.nan, {})}})


def test_the_models_share_of_the_total_is_kept_for_the_statistics() -> None:
    scorer = scorer_with({"exact_match": 1.0, "preference": 0.5}, {"preference": lambda s: 0.0}, 0.25)
    found = scores(scorer, SAMPLES, {"preference": {i: Verdict(value, {}) for i, value in enumerate([1.0, -1.0, 3.0])}})
    assert found.model_total == [0.5, -0.5, 1.5] and found.total == [1.5, -0.5, 2.25]
    assert scores(scorer, SAMPLES).model_total is None
