"""Scoring on one rank: samples that come in pieces, parts that finish late, and failures that nobody waits for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from math import nan
from typing import Any
from unittest.mock import ANY

import pytest

from megappo.rewards.base import RewardError, RewardInput, UnusableAnswer
from megappo.rewards.compose import Composition
from megappo.rewards.inline import InlinePart
from megappo.rewards.scorer import Scorer, _covered
from megappo.runtime.worker_pool import Timed
from tests.rewards.samples import sample, scorer_with, scores
from tests.trainer.experiences import part_means


class Remote:
    """A part whose futures the test fulfils."""

    streams = True

    def __init__(self) -> None:
        self.futures: dict[str, Future[Any]] = {}
        self.closed = False

    def start(self, samples: Sequence[RewardInput]) -> list[Future[Any]]:
        new: dict[str, Future[Any]] = {one.response: Future() for one in samples}
        self.futures |= new
        return list(new.values())

    def close(self) -> None:
        self.closed = True


def test_samples_may_come_in_pieces_and_values_in_any_order() -> None:
    remote = Remote()
    scorer = scorer_with({"remote": 1.0, "length": 0.5}, {"remote": remote, "length": lambda s: len(s.response)})
    scorer.submit([sample("a"), sample("bb")])
    scorer.submit([])
    assert scorer.work(0.0) == (1, 4), "one call of a rule ends the time that it was given"
    scorer.submit([sample("ccc")])
    assert list(remote.futures) == ["a", "bb", "ccc"], "they are started as they come"
    remote.futures["ccc"].set_result({"score": 3, "parts": {"x": 0.5}})
    assert scorer.work(0.05) == (4, 6)
    remote.futures["a"].set_result(Timed(None, 2.5))
    remote.futures["bb"].set_exception(UnusableAnswer("bb"))
    found = scorer.composition.compose(scorer.finish())
    assert found.texts == ["a", "bb", "ccc"] and str(found.total) == "[nan, nan, 4.5]"
    assert str(found.parts) == str({"remote": [nan, nan, 3.0], "length": [1.0, 2.0, 3.0], "remote.x": [nan, nan, 0.5]})
    assert found.no_verdict == ["undecided", "unusable", ""]
    assert max(found.seconds["remote"]) == 2.5 and len(found.seconds["remote"]) == 3
    assert scorer.finish() == [] and not remote.closed
    scorer.close()
    assert remote.closed


def test_a_batch_is_one_call_per_submission_charged_to_its_first_sample() -> None:
    calls: list[int] = []

    def batch(samples: list[RewardInput]) -> list[int]:
        calls.append(len(samples))
        time.sleep(0.02)
        return [len(one.response) for one in samples]

    scorer = scorer_with({"b": 1.0}, {"b": InlinePart("b", batch, batch=True)})
    scorer.submit([sample("a"), sample("bb")])
    assert calls == [], "nothing runs in the main thread before it is asked for"
    scorer.submit([sample("ccc")])
    found = scorer.composition.compose(scorer.finish())
    assert calls == [2, 1] and found.total == [1, 2, 3]
    assert max(found.seconds["b"]) >= 0.02 and sum(found.seconds["b"]) == pytest.approx(max(found.seconds["b"]) * 2, rel=0.5)


@pytest.mark.parametrize(
    "error, says",
    [
        (RewardError("part remote: the server is gone; sample t#1"), "^part remote: the server is gone; sample t#1$"),
        (OSError("no route"), "^reward part remote failed with OSError: no route; sample t#1, response 'b'"),
    ],
)
def test_a_failure_is_not_kept_waiting_by_the_others(error: Exception, says: str) -> None:
    remote = Remote()
    scorer = scorer_with({"remote": 1.0}, {"remote": remote})
    scorer.submit([sample("a"), sample("b", sample_id="t#1")])
    remote.futures["b"].set_exception(error)
    assert scorer.work(60.0) == (2, 2) and scorer.has_failed
    with pytest.raises(RewardError, match=says):
        scorer.finish()
    assert remote.futures["a"].cancelled() and scorer.finish() == []


def test_a_part_that_cannot_start_names_itself() -> None:
    class Broken(Remote):
        def start(self, samples: Sequence[RewardInput]) -> list[Future[Any]]:
            raise OSError("no socket")

    with pytest.raises(RewardError, match="reward part broken failed with OSError: no socket; sample t#0"):
        scores(scorer_with({"broken": 1.0}, {"broken": Broken()}), [sample("a")])


def test_what_was_started_early_is_handed_over_found_in_hand_or_not_at_all() -> None:
    """One value of each kind; parts that do not stream are not started. The owner starts what nobody has begun, and only that."""
    remote, called = Remote(), []
    drawing = scorer_with({"remote": 1.0, "rule": 1.0}, {"remote": remote, "rule": lambda s: called.append(s.response)})
    drawing.submit_early({7: sample("found"), 3: sample("in hand"), 5: sample("waits")})
    remote.futures["found"].set_result({"score": 2, "per_token": [0.5]})
    remote.futures["in hand"].set_running_or_notify_cancel()
    handed_over, early_s = drawing.hand_over()
    assert called == [] and early_s > 0
    assert handed_over == {7: {"remote": ANY}, 3: {"remote": None}, 5: {}}
    assert drawing.work(0.0) == (0, 1) and remote.futures["waits"].cancelled()
    remote.futures["in hand"].set_result(3)
    late = drawing.finish_early()
    assert drawing.work(0.0) == (0, 0) and [*late] == [3] and late[3]["remote"].score == 3

    owning = scorer_with({"remote": 1.0, "rule": 1.0}, {"remote": (other := Remote()), "rule": lambda s: len(s.response)})
    owning.submit([sample("in hand"), sample("waits"), sample("found")], [handed_over[number] for number in (3, 5, 7)])
    assert [*other.futures] == ["waits"]
    other.futures["waits"].set_result(4)
    judged = owning.finish()
    assert [{name: verdict.score for name, verdict in one.verdicts.items()} for one in judged] == [
        {"rule": 7},
        {"remote": 4, "rule": 5},
        {"remote": 2, "rule": 5},
    ]
    assert judged[2].verdicts["remote"].per_token == (0.5,)


def test_an_early_failure_is_raised_at_the_end_and_never_in_generation() -> None:
    class Broken(Remote):
        def start(self, samples: Sequence[RewardInput]) -> list[Future[Any]]:
            raise OSError("no socket")

    for part, says in ((Broken(), "reward part it failed with OSError: no socket"), (Remote(), "reward rule it returned nan")):
        scorer = scorer_with({"it": 1.0}, {"it": part})
        scorer.submit_early({4: sample("a", sample_id="t#4")})
        for future in part.futures.values():
            future.set_result(float("nan"))
        assert scorer.hand_over()[0] == {4: {"it": None}}, "nobody else starts it"
        with pytest.raises(RewardError, match=f"{says}.*sample t#4"):
            scorer.finish_early()
        assert scorer.work(0.0) == (0, 0)


def test_seconds_of_early_values_are_those_in_which_any_was_in_hand() -> None:
    assert _covered([]) == 0 and _covered([(1, 2), (4, 6), (1.5, 3), (5, 5.5)]) == 4


def test_a_sample_is_scored_by_the_parts_of_its_recipe() -> None:
    """By hand: weights differ, `both` is one part, and a part's mean is that of the samples that it scored."""
    recipes = {"math": {"number": 1.0, "both": 0.5}, "code": {"both": 2.0, "tests": 0.0}}
    parts = {"number": lambda s: 3.0, "both": lambda s: len(s.response), "tests": lambda s: {"score": 1, "parts": {"passed": 7}}}
    made = {name: InlinePart(name, rule) for name, rule in parts.items()}
    scorer = Scorer(made, Composition(recipes, missing_eos_penalty=1.0), lambda record: record["kind"])
    samples = [RewardInput("q", text, "", cut, 1, {"kind": kind}, "t") for text, cut, kind in RECORDS]
    found = scores(scorer, samples)
    assert found.total == [3.5, 4.0, 3.0] and found.labels == ["math", "code", "math"]
    assert {name: [None if x != x else x for x in values] for name, values in found.parts.items()} == {
        "number": [3, None, 3],
        "both": [1, 2, 2],
        "tests": [None, 1, None],
        "tests.passed": [None, 7, None],
        "missing_eos_penalty": [0, 0, -1],
    }
    assert part_means(found) == pytest.approx(
        {"number": 3, "both": 5 / 3, "tests": 1, "tests.passed": 7, "missing_eos_penalty": -1 / 3}
    )


RECORDS = [("a", False, "math"), ("bb", False, "code"), ("cc", True, "math")]


def test_rewards_of_tokens_are_weighed_beside_the_score() -> None:
    parts = {
        "a": lambda s: {"score": 1, "per_token": [1.0, 2.0]} if s.response != "none" else 1,
        "b": lambda s: {"score": 0, "per_token": (0.5, -0.5)} if s.response == "both" else 0,
        "idle": lambda s: {"score": 0, "per_token": [9.0, 9.0]},
    }
    samples = [sample(text, num_tokens=2) for text in ("one", "both", "none")]
    found = scores(scorer_with({"a": 2.0, "b": 4.0, "idle": 0.0}, parts), samples)
    assert found.per_token == [[2.0, 4.0], [4.0, 2.0], None], "weight 0 is logged without counting"
    assert found.total == [2.0, 2.0, 2.0], "the score is the score"
    assert found.parts["a.per_token"] == [3.0, 3.0, 0.0] and found.parts["idle.per_token"] == [18.0] * 3
    assert scores(scorer_with({"idle": 0.0, "a": 0.0}, parts), samples).per_token is None
