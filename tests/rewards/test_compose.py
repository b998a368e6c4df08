"""Composition of rules: weights, penalties, parts for the logs, and a rule that fails stops everything."""

from __future__ import annotations

import math

import pytest
import torch

from megappo.rewards import compose
from megappo.rewards.base import RewardInput
from megappo.rewards.compose import RewardError, Scorer
from tests.rewards.samples import sample

SAMPLES = [
    sample("#### 72", "#### 72", num_tokens=5),
    sample("#### 71", "#### 72", num_tokens=10),
    sample("#### 72", "#### 72", truncated=True, num_tokens=14),
]


def test_the_total_is_the_weighted_sum_less_the_penalties() -> None:
    """By hand: strict 1, 0, 1; format 1, 1, 1; eos penalty 0, 0, 0.5; tokens beyond 8: 0, 2, 6."""
    scores = Scorer([("gsm8k_strict", 2.0), ("gsm8k_format", 0.25), ("exact_match", 0.0)], 0.5, 0.125, 8).score(SAMPLES)
    assert scores.total.dtype == torch.float32
    assert scores.total.tolist() == [2.25, 0.25 - 0.25, 2.25 - 0.5 - 0.75]
    assert {name: values.tolist() for name, values in scores.parts.items()} == {
        "gsm8k_strict": [1, 0, 1],
        "gsm8k_format": [1, 1, 1],
        "exact_match": [1, 0, 1],
        "missing_eos_penalty": [0, 0, -0.5],
        "length_penalty": [0, -0.25, -0.75],
    } and scores.num_undecided == 0


def test_penalties_of_0_have_no_part() -> None:
    assert list(Scorer([("has_eos", 1.0)]).score(SAMPLES).parts) == ["has_eos"]


def test_an_empty_batch_has_empty_scores() -> None:
    scores = Scorer([("has_eos", 1.0)], 1.0).score([])
    assert scores.total.shape == (0,) and scores.parts["has_eos"].shape == (0,)


def test_undecided_samples_are_counted_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Scorer([("math_verify", 1.0)])
    rule = scorer._rules["math_verify"]
    monkeypatch.setattr(rule, "cpu_limit_s", 0.8)
    scores = scorer.score([sample("$10^{10^{10}}$", "5"), sample("5", "5")])
    assert (scores.total.tolist(), scores.num_undecided) == ([0.0, 1.0], 1)
    assert scorer.score([sample("5", "5")]).num_undecided == 0


def raises(given: RewardInput) -> float:
    raise KeyError("gold")


@pytest.mark.parametrize(
    "rule, says",
    [
        (raises, "reward rule exact_match raised KeyError: 'gold'; sample t#41, response 'yyy"),
        (lambda s: math.nan, "reward rule exact_match returned nan, not a finite number; sample t#41"),
        (lambda s: -math.inf, "returned -inf, not a finite number; sample t#41"),
        (lambda s: 1e39, "returned 1e+39, not a finite number; sample t#41"),  # infinite in fp32
        (lambda s: 10**400, "not a finite number; sample t#41"),  # no float at all
        (lambda s: "1", "returned '1', not a finite number; sample t#41"),
    ],
)
def test_a_rule_that_fails_names_sample_rule_and_response(monkeypatch: pytest.MonkeyPatch, rule, says: str) -> None:
    monkeypatch.setattr(compose, "make_rule", lambda name: lambda s: 1.0 if s.response == "good" else rule(s))
    scorer = Scorer([("exact_match", 1.0)])
    assert scorer.score([sample("good")]).total.tolist() == [1.0]
    with pytest.raises(RewardError) as caught:
        scorer.score([sample("good"), sample("y" * 500, sample_id="t#41")])
    assert says in str(caught.value)
    assert "y" * 200 in str(caught.value) and "y" * 201 not in str(caught.value)


def test_a_sum_that_overflows_names_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "make_rule", lambda name: lambda s: 3e38)
    with pytest.raises(RewardError, match=r"add up to 6e\+38, which fp32 does not hold; sample t#41"):
        Scorer([("exact_match", 1.0), ("has_eos", 1.0)]).score([sample("x", sample_id="t#41")])


def test_an_answer_that_a_rule_cannot_read_scores_0_and_is_counted() -> None:
    """It may come after hours, and again after every resume: it must not end the run."""
    samples = [sample("#### 70", "seventy"), sample("#### 70", "70"), sample("#### 70", "")]
    scores = Scorer([("gsm8k_strict", 1.0), ("math_verify", 1.0), ("has_eos", 0.5)]).score(samples)
    assert scores.total.tolist() == [0.5, 2.5, 0.5]
    assert (scores.num_unusable, scores.num_undecided) == (3, 0)  # math_verify reads `seventy` as a text


def test_an_undecided_rule_scores_0_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "make_rule", lambda name: lambda s: None)
    scores = Scorer([("exact_match", 1.0)]).score([sample("a", "a")])
    assert (scores.total.tolist(), scores.num_undecided, scores.num_unusable) == ([0.0], 1, 0)


@pytest.mark.parametrize(
    "parts, says",
    [
        ([], "reward.parts is empty"),
        ([("exact_match", 1.0), ("exact_match", 2.0)], "reward.parts names exact_match twice"),
        ([("exact_match", math.nan)], "the weight of exact_match is nan"),
        ([("exact", 1.0)], "did you mean exact_match?"),
    ],
)
def test_impossible_compositions_are_refused(parts: list, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        Scorer(parts)
    assert says in str(caught.value)
