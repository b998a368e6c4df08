"""Scores over ranks: each scores its share, all know how far all are, and nobody waits for a rank that has failed."""

from __future__ import annotations

import json
import operator
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megappo.config.run_sections import TimeoutsConfig
from megappo.data.prompts import Prompt
from megappo.rollout.build import RolloutElsewhere
from megappo.rollout.types import BATCH, Replica, Request, SamplingParams
from megappo.runtime.sections import AwakeClock, Sections
from megappo.trainer.scoring import FIRST_NOTE_S, NOTE_EVERY_S, ScoringProgress
from tests.rollout.responses import answered
from tests.worlds import spawn_world

SHARE = 12  # responses of each rank


def scoring_world(rank: int) -> dict[str, Any]:
    """What this rank finds: scores, the progress that it saw, and the error and its calls when a rule fails on rank 1."""
    from megappo.rewards.base import RewardError
    from megappo.rewards.compose import Composition
    from megappo.rewards.inline import InlinePart
    from megappo.rewards.scorer import Scorer
    from megappo.rewards.verdict import Verdict
    from megappo.trainer import scoring
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


REWARD_S, POLL_S = 0.1, 0.12


def streaming_world(rank: int) -> dict[str, Any]:
    """Generation on rank 0 alone, a response at a time, and a reward with one slow worker on each rank.

    Seconds and scores of stages 2 and 3 with and without early rewards; and the error of a part that fails.
    """
    from megappo.rewards.base import RewardError
    from megappo.rewards.compose import Composition, Scored
    from megappo.rewards.inline import InlinePart
    from megappo.rewards.pool import PoolPart
    from megappo.rewards.scorer import Scorer
    from megappo.rewards.verdict import Verdict
    from megappo.rollout.generation import generate
    from megappo.trainer import scoring
    from megappo.trainer.experience.collect import collect

    scoring.ROUND_S = 0.2
    count = 2 * SHARE
    tokenizer: Any = SimpleNamespace(eos_ids=(0,), decode=str, decode_all=str)
    prompts = [Prompt(f"f#{i}", (1,), "?", str(i), {"kind": "odd" if i % 3 else "third"}) for i in range(count)]
    requests = [Request(i, (1,), seed=i) for i in range(count)]

    class Slow:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, sample: Any) -> Any:
            time.sleep(REWARD_S)
            self.calls += 1
            if sample.answer == fails_at:
                raise OSError("gone")
            number = int(sample.answer)
            return None if number == 4 else {"score": number, "per_token": [0.0, 0.5 * number, 0.0], "parts": {"half": number / 2}}

        def close(self) -> None: ...

    fails_at, workers = "", []
    batches: list[int] = []

    def make() -> Slow:
        workers.append(Slow())
        return workers[-1]

    def batch(samples: list[Any]) -> list[float]:
        batches.append(len(samples))
        return [float(one.answer) for one in samples]

    def score_model(prompts: Any, judged: Any) -> list[Verdict]:
        slow = [one.verdicts.get("slow") for one in judged]
        return [Verdict(one.score if one is not None and not one.reason else -1.0, {}) for one in slow]

    def scorer_of(make: Any) -> Scorer:
        parts = {"slow": PoolPart("slow", make, 1), "batch": InlinePart("batch", batch, batch=True)}
        recipes = {"odd": {"slow": 1.0, "batch": 0.25, "model": 1.0}, "third": {"batch": 2.0, "slow": 2.0}}
        return Scorer(parts, Composition(recipes), operator.itemgetter("kind"), score_model=score_model)

    def judged(responses: list[Any]) -> list[Any]:
        """The responses as the rollout half of an asynchronous run hands them over: verdicts are JSON."""
        beside, found = scoring.RewardsBeside(scorer_of(Slow), tokenizer, ()), {}
        for one in responses:
            beside.start(7 * BATCH + one.number, one, prompts[one.number])
        while len(found) < len(responses):
            found |= json.loads(json.dumps(beside.take()))
        beside.close()
        return [replace(one, verdicts=found[str(7 * BATCH + one.number)]) for one in responses]

    def step(poll_s: float, early: bool, elsewhere: bool = False) -> tuple[float, Scored]:
        scorer = scorer_of(make)
        dist.barrier()
        begun = time.monotonic()
        begin = scoring.begin_rewards(prompts.__getitem__, tokenizer, scorer)
        assert begin is not None
        engine: Any = OneByOne(poll_s) if rank == 0 else RolloutElsewhere("one by one", None)
        responses = generate(engine, requests, SamplingParams(3), begin if early else None)
        if elsewhere:
            begin(judged(responses))
        scored = scoring.score_responses(collect(requests, responses), prompts.__getitem__, tokenizer, scorer)
        seconds = time.monotonic() - begun
        scorer.close()
        return seconds, scored

    found: dict[str, Any] = {}
    ways = {"plain": (POLL_S, False), "early": (POLL_S, True), "all at the end": (0.0, True), "elsewhere": (0.0, False, True)}
    for name, way in ways.items():
        workers.clear()
        batches.clear()
        seconds, scored = step(*way)
        found[name] = {"seconds": seconds, "scored": scored, "calls": sum(one.calls for one in workers), "batches": [*batches]}
    fails_at = "0"
    with pytest.raises(RewardError) as raised:
        step(REWARD_S, True)
    return {**found, "failed": str(raised.value)}


class OneByOne:
    """Engine of one replica that finishes a response each time it is polled."""

    replica = Replica(0, 1, None, None)

    def __init__(self, poll_s: float) -> None:
        self._poll_s, self._waiting = poll_s, []

    def serving(self) -> Any:
        return nullcontext()

    def meet(self, before: str) -> None: ...

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return self.num_unfinished

    def submit(self, requests: Any, sampling: Any) -> None:
        self._waiting += requests

    def poll(self) -> list[Any]:
        time.sleep(self._poll_s)
        return [answered((2, 3, 0), number=self._waiting.pop(0).number)]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return spawn_world(both_worlds, 2)


def both_worlds(rank: int) -> dict[str, Any]:
    return {**scoring_world(rank), "streaming": streaming_world(rank)}


def test_rewards_beside_generation_cost_the_longer_of_the_two(ranks: list[dict[str, Any]]) -> None:
    """Negative control: after generation they cost the sum, though both ranks share them."""
    generation_s = 2 * SHARE * POLL_S
    seconds = {name: ranks[0]["streaming"][name]["seconds"] for name in ("plain", "early", "all at the end")}
    assert seconds["plain"] > generation_s + SHARE * REWARD_S
    # Against the control of the same machine: what is slow there is slow here.
    assert generation_s < seconds["early"] < seconds["plain"] - 0.5 * SHARE * REWARD_S
    early_s = [rank["streaming"]["early"]["scored"].early_s for rank in ranks]
    assert SHARE * REWARD_S < early_s[0] < seconds["early"] and early_s[1] == 0


def test_early_rewards_are_the_same_to_the_last_bit_and_in_the_same_order(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        ways = ("plain", "early", "all at the end", "elsewhere")
        plain, *others = (vars(rank["streaming"][name]["scored"]) for name in ways)
        assert plain["no_verdict"] or ranks[0]["streaming"]["plain"]["scored"].no_verdict and plain["per_token"]
        assert not set(plain["total"]) <= {0.0} and {"slow.half", "slow.per_token", "model"} <= set(plain["parts"])
        for other in others:
            same = {name: value for name, value in other.items() if name not in ("seconds", "early_s")}
            assert repr(same) == repr({name: plain[name] for name in same}), "repr: NaN is not equal to itself"
        assert {tuple(rank["streaming"][name]["batches"]) for name in ("plain", "early")} == {(SHARE,)}, "a batch stays whole"
        assert rank["streaming"]["elsewhere"]["calls"] == 0, "the rollout half has all verdicts"


def test_what_no_worker_had_begun_is_scored_by_the_owners(ranks: list[dict[str, Any]]) -> None:
    """All responses come at once on rank 0: its one worker does not score them for both ranks."""
    calls = [rank["streaming"]["all at the end"]["calls"] for rank in ranks]
    assert calls == pytest.approx([SHARE, SHARE], abs=SHARE / 2) and sum(calls) == 2 * SHARE


def test_an_early_failure_ends_the_step_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert {rank["streaming"]["failed"].split(", response")[0] for rank in ranks} == {
        "rank 0: reward part slow failed with OSError: gone; sample f#0 (sample 0)"
    }


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
    monkeypatch.setattr("megappo.runtime.sections.time.monotonic", lambda: now[0])
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
