"""Scores over ranks: each scores its share, all know how far all are, and nobody waits for a rank that has failed."""

from __future__ import annotations

import operator
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megappo.config.run_sections import TimeoutsConfig
from megappo.resilience.sections import AwakeClock, Sections
from megappo.trainer.scoring import FIRST_NOTE_S, NOTE_EVERY_S, ScoringProgress
from tests.worlds import spawn_world

SHARE = 12  # responses of each rank


def scoring_world(rank: int) -> dict[str, Any]:
    """What this rank finds: scores, the progress that it saw, and the error and its calls when a rule fails on rank 1."""
    from megappo.data.prompts import Prompt
    from megappo.rewards.base import RewardError
    from megappo.rewards.compose import Composition
    from megappo.rewards.inline import InlinePart
    from megappo.rewards.scorer import Scorer
    from megappo.rewards.verdict import Verdict
    from megappo.trainer import scoring
    from tests.rollout.responses import answered
    from tests.trainer.experiences import score

    scoring.ROUND_S = 0.2
    count = 2 * SHARE
    tokenizer: Any = SimpleNamespace(eos_ids=(0,), decode=str, decode_all=str)
    prompts = [Prompt(f"f#{i}", (1,), "?", str(i), {"kind": "odd" if i % 3 else "third"}) for i in range(count)]
    responses = [answered((2, 3, 0)) for _ in prompts]

    def index(sample: Any) -> dict[str, Any]:
        time.sleep(0.1 * rank)  # rank 0 has ended long before rank 1
        return {"score": int(sample.answer), "per_token": [0.0, int(sample.answer), 0.0]}

    called: list[str] = []

    def fails(sample: Any) -> float:
        called.append(sample.answer)
        time.sleep(0.1)
        if sample.answer == "1":
            raise OSError("gone")
        return 0.0

    seen: list[tuple[int, int]] = []

    asked: list[int] = []

    def score_model(prompts: Any, judged: Any) -> list[Verdict]:
        asked.append(len(prompts))
        return [Verdict(float(prompt.answer), {}) for prompt in prompts]

    def scorer(rule: Any, extra: dict[str, float]) -> Scorer:
        parts = {"rule": InlinePart("rule", rule), "extra": InlinePart("extra", lambda s: 1.0)}
        recipes = {"odd": {"rule": 1.0}, "third": {"rule": 2.0, **extra}}
        label_of = operator.itemgetter("kind")
        return Scorer(parts, Composition(recipes), label_of, lambda *counts: seen.append(counts), score_model)

    whole = scorer(index, {"extra": 1.0, "model": 1.0})
    found = score(prompts, responses, tokenizer, whole)
    progress, seen = seen, []
    try:
        score(prompts, responses, tokenizer, scorer(fails, {}))
        failed = ""
    except RewardError as error:
        failed = str(error)
    odd = [i for i in range(count) if i % 3]
    of_one_recipe = ([prompts[i] for i in odd], [responses[i] for i in odd], tokenizer)
    unjudged = score(*of_one_recipe, scorer(index, {"model": 1.0}))
    return {"found": found, "unjudged": unjudged, "asked": asked, "progress": progress, "failed": failed, "called": len(called)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return spawn_world(scoring_world, 2)


def test_each_rank_has_the_scores_of_its_samples_in_their_order(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(rank["found"] for rank in ranks):
        numbers = range(rank, 2 * SHARE, 2)
        assert found.total == [i if i % 3 else 2 * i + 1 + i for i in numbers]
        assert found.labels == ["odd" if i % 3 else "third" for i in numbers]
        assert found.per_token == [[0.0, i if i % 3 else 2 * i, 0.0] for i in numbers]
        assert len(found.seconds["rule"]) == SHARE
    assert max(ranks[1]["found"].seconds["rule"]) >= 0.1


def test_a_recipe_without_the_reward_model_is_scored_without_it(ranks: list[dict[str, Any]]) -> None:
    """Of a step whose samples all take such a recipe the model is asked nothing, on no rank."""
    for number, rank in enumerate(ranks):
        assert rank["asked"] == [SHARE // 3], "its samples of the other recipe, once"
        assert rank["unjudged"].total == [float(i) for i in range(2 * SHARE) if i % 3][number::2]
        assert rank["unjudged"].model_total is None


def test_all_ranks_see_how_far_all_are(ranks: list[dict[str, Any]]) -> None:
    progress = ranks[0]["progress"]
    total = 2 * SHARE + -(-2 * SHARE // 3)
    assert progress == ranks[1]["progress"] and progress[-1] == (total, total)
    assert len(progress) > 2 and [found for found, _ in progress] == sorted(found for found, _ in progress)
    assert progress[0][0] < total


def test_a_failure_stops_all_ranks_before_they_have_scored_their_share(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["failed"] == ranks[1]["failed"]
    assert ranks[0]["failed"].startswith("rank 1: reward rule rule raised OSError: gone; sample f#1 (sample 1), response ")
    assert ranks[1]["called"] == 1 and 1 <= ranks[0]["called"] < SHARE


def test_long_scoring_is_told_and_keeps_the_watchdog_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [0.0], []
    monkeypatch.setattr("megappo.resilience.sections.time.monotonic", lambda: now[0])
    marks = Sections(TimeoutsConfig(), AwakeClock(1e6))
    progress = ScoringProgress(told.append, marks, clock=lambda: now[0])
    for of in (10, 1000, 1000):  # a quick one, and two slow ones of the same size
        pause = 0.125 if of == 10 else FIRST_NOTE_S + 1
        with marks.section("score"):
            for found in range(0, of + 1, of // 10):
                progress(found, of)
                assert marks.now().seconds == 0 or found == 0
                now[0] += pause
                if found < of:
                    progress(found, of)
                    assert marks.now().seconds >= pause, "no progress, no respite"
    assert told[0] == f"score: 0/1,000 rewards after {FIRST_NOTE_S + 1:.0f} s"
    assert len(told) == 2 * len(told[: len(told) // 2]) and told[len(told) // 2] == told[0]
    assert len(told) <= 2 * (1 + 10 * (FIRST_NOTE_S + 1) / NOTE_EVERY_S)
