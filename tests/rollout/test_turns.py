"""Trajectories of several turns, compacted ones too, around an engine that answers by a rule, and around the policy's own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch.distributed as dist

from megappo.data.prompts import Prompt
from megappo.rollout import turns
from megappo.rollout.episodes import Episodes
from megappo.rollout.generation import generate
from megappo.rollout.snapshot import Snapshot
from megappo.rollout.turn import Turn
from megappo.rollout.turns import Answer, Asked, Compaction, Environment, Left, TurnsRollout
from megappo.rollout.types import BATCH, EnvironmentFault, KeptIds, Replica, Request, Response, SamplingParams, Segment
from megappo.rollout.vllm_outputs import Drawn
from tests.rollout.compaction import keep_ends

END = 2
SAMPLING = SamplingParams(max_tokens=40, stop_token_ids=(END,))


class Rule:
    """Engine whose turns are the length of what it was given, once for each turn that it may write, then END."""

    name, replica = "rule", Replica(0, 1, None, 2)

    def __init__(self, per_turn: int = 2) -> None:
        self.waiting: list[Request] = []
        self.asked: list[Request] = []
        self._per_turn = per_turn

    def meet(self, before: str) -> None: ...

    @contextmanager
    def serving(self) -> Iterator[None]:
        yield

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return self.num_unfinished

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        self.waiting += requests
        self.asked += requests

    def poll(self) -> list[Response]:
        request, *self.waiting = self.waiting
        wanted = [len(request.tokens)] * self._per_turn + [END]
        tokens = numpy.array(wanted[: request.limit(SAMPLING)], numpy.int32)
        finish = "stop" if tokens[-1] == END else "length"
        segment = Segment(tokens, numpy.full(len(tokens), -1.0, numpy.float32), 5)
        return [Response(request.number, (segment,), finish, KeptIds(numpy.ones(len(tokens), numpy.int32), tokens))]

    def push_weights(self, version: int) -> dict[str, float]:
        return {}

    def sleep(self) -> None: ...

    def close(self) -> None: ...


def answers(engine: Rule, environment, count: int = 3, **settings) -> list[Response]:
    usual: dict[str, Any] = {"max_turns": 3, "turn_tokens": 5, "max_prompt_tokens": 20} | settings
    requests = [Request(i, [7] * (i + 1), seed=100 + i, group=i) for i in range(count)]
    return generate(TurnsRollout(engine, environment, **usual), requests, SAMPLING)


def parts(segments: Sequence[Segment]) -> list[tuple[list[int], bool]]:
    return [(one.tokens.tolist(), one.logprobs is not None) for one in segments]


def observe(turn: Turn) -> list[int]:
    return [50 + turn.index]


def test_an_environment_answers_each_turn_until_the_last():
    engine, seen = Rule(), []

    def environment(turn: Turn) -> list[int] | None:
        seen.append((turn.number, turn.index, turn.tokens.tolist(), turn.context.tolist()))
        return None if turn.number == 1 and turn.index == 1 else [50 + turn.index]

    found = answers(engine, environment)
    # a turn is [n, n, END], n ids being before it; an observation is one id
    assert parts(found[0].segments) == [([1, 1, 2], True), ([50], False), ([5, 5, 2], True), ([51], False), ([9, 9, 2], True)]
    assert parts(found[1].segments) == [([2, 2, 2], True), ([50], False), ([6, 6, 2], True)]
    assert all(one.contexts == () and one.prompt is None and one.finish == "stop" for one in found)
    assert found[0].kept is not None and found[0].kept.ids.tolist() == [1, 1, 2, 5, 5, 2, 9, 9, 2]
    assert sorted(one for one in seen if one[0] == 0) == [(0, 0, [1, 1, 2], [7]), (0, 1, [5, 5, 2], [7, 1, 1, 2, 50])]
    assert [one[1] for one in seen if one[0] == 1] == [0, 1], "not asked after the last turn"
    seeds = [one.seed for one in engine.asked]
    assert len(set(seeds)) == len(seeds) == 8, "every turn draws anew"


def test_a_turn_or_a_sequence_at_its_limit_ends_the_trajectory_cut():
    (found,) = answers(Rule(per_turn=9), observe, 1)
    assert parts(found.segments) == [([1] * 5, True)] and found.finish == "length"
    engine = Rule(per_turn=4)  # 5 tokens and one given: the seventh turn begins at the 36th token and has room for 4
    (found,) = answers(engine, observe, 1, max_turns=99)
    assert sum(len(one.tokens) for one in found.segments) == 40 and found.finish == "length"
    assert [one.max_tokens for one in engine.asked] == [5] * 6 + [4]


def test_a_context_that_grows_too_long_is_compacted():
    (found,) = answers(Rule(), observe, 1, max_turns=4, compaction=Compaction(9, keep_ends(1, 3)))
    # 1 + 3 + 1, then 5 + 3 + 1 = 9 ids fit; the next observation would be the tenth and more
    (context,) = found.contexts
    assert context.prompt.tolist() == [7]
    assert parts(context.segments) == [([1, 1, 2], True), ([50], False), ([5, 5, 2], True), ([51], False), ([9, 9, 2], True)]
    assert found.prompt is not None and found.prompt.tolist() == [7, 9, 2, 52], "the first id and the last three"
    assert parts(found.segments) == [([4, 4, 2], True)] and found.finish == "stop"
    assert context.kept is not None and context.kept.ids.tolist() == [1, 1, 2, 5, 5, 2, 9, 9, 2]
    assert found.kept is not None and found.kept.ids.tolist() == [4, 4, 2]


def test_the_policy_writes_the_summary_that_it_goes_on_from():
    seen: list[Left] = []

    def prompt(left: Left) -> list[int]:
        seen.append(left)
        return [*left.prompt.tolist(), *left.summary.tolist(), *left.observation.tolist()]

    (found,) = answers(Rule(), observe, 1, compaction=Compaction(6, prompt, ask=(60, 61)))
    (context,) = found.contexts
    # after the second turn 8 ids and an observation are more than 6: it is kept back, and a summary asked for
    turns = [([1, 1, 2], True), ([50], False), ([5, 5, 2], True), ([60, 61], False), ([10, 10, 2], True)]
    assert parts(context.segments) == turns, "the summary is sampled as any turn"
    assert found.prompt is not None and found.prompt.tolist() == [7, 10, 10, 2, 51]
    assert parts(found.segments) == [([5, 5, 2], True)], "the third turn of three: summaries are not counted"
    assert seen[0].context.tolist() == [7, *(token for tokens, _ in turns for token in tokens)]


def test_what_has_no_meaning_is_refused():
    with pytest.raises(ValueError, match="compaction: a prompt of 21 tokens, not of 1 to 20"):
        answers(Rule(), observe, 1, compaction=Compaction(6, lambda left: [7] * 21))
    with pytest.raises(ValueError, match="rollout.partial_rollout_tokens: trajectories of several turns do not go on"):
        TurnsRollout(Rule(), observe, max_turns=2, turn_tokens=2, max_prompt_tokens=9).submit(
            [Request(0, [1], 0, goes_on=True)], SAMPLING
        )


# --------------------------------------------------------------------------------------------------------- beside generation


class Beside:
    """The environment in threads, each of whose answers comes after a delay of its own."""

    def __init__(self, environment: Environment, delay: Callable[[Turn], float]) -> None:
        self._environment, self._delay, self._pool = environment, delay, ThreadPoolExecutor(4)

    def start(self, turn: Turn) -> Asked:
        future = self._pool.submit(self._answer, turn)
        return Asked(future, future.result)

    def close(self) -> None:
        self._pool.shutdown()

    def _answer(self, turn: Turn) -> Answer:
        time.sleep(self._delay(turn))
        return Answer(self._environment(turn), self._delay(turn))


class Held:
    """An environment whose answer to some turns comes only when other turns have been asked about."""

    def __init__(self, until: dict[tuple[int, int], tuple[int, int]]) -> None:
        self._until, self._open, self.asked = until, dict[tuple[int, int], Future[None]](), []

    def start(self, turn: Turn) -> Asked:
        key = turn.number, turn.index
        self.asked.append(key)
        future = self._open[key] = Future()
        for waiting in [*self._open]:
            if self._until.get(waiting, waiting) in self.asked:
                self._open.pop(waiting).set_result(None)
        return Asked(future, lambda: Answer(observe(turn), 0.5))

    def close(self) -> None: ...


def whole(found: Sequence[Response]) -> list[tuple]:
    return [
        (one.number, parts(one.segments), one.finish, one.prompt, [(c.prompt.tolist(), parts(c.segments)) for c in one.contexts])
        for one in found
    ]


@pytest.mark.parametrize("together", [True, False])
def test_whichever_turn_is_answered_first_the_trajectories_are_those_of_a_rank_that_waits(together):
    def environment(turn: Turn) -> list[int] | None:
        seen = turn.memo.setdefault("seen", [])
        seen.append(turn.number)
        assert seen == [turn.number] * (turn.index + 1), "no state of another trajectory"
        return None if turn.number == 1 and turn.index == 1 else [50 + turn.index]

    wanted = answers(Rule(), environment, 6)
    for order in (1, -1):
        beside = Beside(environment, lambda turn: 0.01 * (order * (turn.number + turn.index) % 6))
        engine = Rule()
        assert whole(answers(engine, beside, 6, together=together)) == whole(wanted)
        seeds = {(len(one.tokens), one.number): one.seed for one in engine.asked}
        assert len(set(seeds.values())) == len(engine.asked), "a turn draws by its own seed, whenever it begins"


def test_the_engine_goes_on_with_samples_that_wait_for_nobody(monkeypatch):
    """Sample 0 is answered only when sample 2 has had its second turn, though two places hold two samples at once."""
    rounds = []

    def shortly(asked, seconds, return_when):
        rounds.append(seconds)
        assert len(rounds) < 20, "all places are held by samples that wait"
        return wait(asked, 0.01, return_when)

    monkeypatch.setattr(turns, "wait", shortly)
    held = Held({(0, 0): (2, 1)})
    found = answers(Rule(), held, 3, together=False)
    assert whole(found) == whole(answers(Rule(), observe, 3))
    assert held.asked.index((2, 1)) < held.asked.index((0, 1)) and (2, 0) in held.asked[:3], "its place went to another"
    assert [one.played.turns for one in found if one.played] == [3, 3, 3]
    assert all(one.played and one.played.reached_limit and one.played.seconds == (0.5, 0.5) for one in found)


@pytest.mark.parametrize("places, until", [(2, {(0, 0): (2, 0)}), (1, {})])
def test_together_no_trajectory_goes_on_before_all_are_answered(places, until):
    """Nor before all have begun, of which `places` run at once."""
    engine, held = Rule(), Held(until)
    engine.replica = Replica(0, 1, None, places)
    assert whole(answers(engine, held, 3)) == whole(answers(Rule(), observe, 3))
    rounds = [sorted(held.asked[i : i + 3]) for i in range(0, len(held.asked), 3)]
    assert rounds == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (1, 1), (2, 1)]]
    assert [one.number for one in engine.asked[3:]] == [0, 1, 2] * 2, "in the order of their numbers"


class ByRanks(Rule):
    """The same of a replica of two ranks, which answer in turn."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank, self.replica = rank, Replica(0, 1, dist.group.WORLD, None)

    def poll(self) -> list[Response]:
        return [one for one in super().poll() if one.number % 2 == self._rank]


class HeldForRounds:
    """An environment that answers the first turn of sample 3 when its rank has waited ten times, and every other turn at once."""

    def __init__(self) -> None:
        self._held, self._rounds = Future[None](), 0

    def start(self, turn: Turn) -> Asked:
        future = self._held if (turn.number, turn.index) == (3, 0) else Future()
        if future is not self._held:
            future.set_result(None)
        return Asked(future, lambda: Answer(observe(turn), 0.5))

    def wait(self, *_: object) -> None:
        self._rounds += 1
        if self._rounds == 10:
            self._held.set_result(None)

    def close(self) -> None: ...


class WentOn(Exception): ...


def asked_of_replica(rank: int, *, agrees: bool = True) -> list[int]:
    """Numbers of the turns that an engine of two ranks draws, in its order, where one of rank 1 is answered rounds after the others
    (`tests/trainer/test_chains.py` has the ranks). agrees: the ranks tell each other how many turns are open; without that they
    would wait for each other for ever, so the answer ends with the first turns that go on."""
    engine, environment = ByRanks(rank), HeldForRounds()
    submit = engine.submit

    def end_there(requests: Sequence[Request], sampling: SamplingParams) -> None:
        submit(requests, sampling)
        if len(engine.asked) > 4:
            raise WentOn

    alone = contextlib.ExitStack()
    if not agrees:
        alone.enter_context(mock.patch.object(dist, "all_reduce"))
        alone.enter_context(mock.patch.object(engine, "submit", end_there))
        alone.enter_context(contextlib.suppress(WentOn))
    with mock.patch.object(turns, "wait", environment.wait), alone:
        answers(engine, environment, 4)
    return [one.number for one in engine.asked]


def test_a_late_answer_ends_its_trajectory_cut_and_a_fault_travels_with_it():
    class Late(Held):
        def start(self, turn: Turn) -> Asked:
            asked = super().start(turn)
            if turn.number == 0 and turn.index == 1:
                return asked._replace(take=lambda: Answer(None, 9.0, is_late=True, no_verdict="undecided"))

            def fail() -> Answer:
                raise EnvironmentFault("no tool")

            return asked._replace(take=fail) if turn.number == 2 else asked

    late, whole_one, failed = answers(Rule(), Late({}))
    assert late.finish == "length" and late.played is not None and late.played.is_late and late.played.seconds == (0.5, 9.0)
    assert whole_one.finish == "stop" and whole_one.played is not None and not whole_one.played.is_late
    assert failed.fault == "no tool" and failed.played is not None and failed.played.turns == 1


# ------------------------------------------------------------------------------------------------------ in an asynchronous run


class Asynchronous(Rule):
    """The rule as an engine whose requests may go on in another one."""

    def submit(self, requests: Sequence[Request], sampling: SamplingParams, drawn: Mapping[int, Drawn] = {}) -> None:
        super().submit(requests, sampling)

    def drawn(self) -> dict[int, Drawn]:
        return {one.number: Drawn() for one in self.waiting}


def play(compaction: Compaction | None, drawn: Mapping[int, Drawn] = {}) -> tuple[list, list, list[dict[int, Drawn]]]:
    """A trajectory from what was drawn: its sequences, the turns that the environment was asked for, and what there was of it
    before each step and each answer."""
    seen: list[tuple] = []

    def environment(turn: Turn) -> list[int]:
        turn.memo["turns"] = turn.memo.get("turns", 0) + 1
        assert turn.memo["turns"] == turn.index + 1, "its state has seen all earlier turns"
        seen.append((turn.number, turn.index, turn.tokens.tolist(), turn.context.tolist()))
        return [50 + turn.index]

    engine: Any = Asynchronous()
    episodes = Episodes(engine, environment, max_turns=5, turn_tokens=5, max_prompt_tokens=20, compaction=compaction)
    request = Request(3 * BATCH + 4, [7], seed=100, source=Prompt("p#0", (7,), "", "", {}))
    episodes.submit([request], SAMPLING, drawn)
    found, ended = [], []
    while not ended:
        found.append(Snapshot.decoded(Snapshot(0, 0, 0, 0, episodes.drawn(), []).encoded()).running)
        ended = episodes.take(engine.poll()) if engine.waiting else episodes.go_on(episodes.answers())
    (response,) = ended
    sequences = [(one.prompt.tolist(), parts(one.segments)) for one in response.contexts]
    return [*sequences, parts(response.segments), response.finish, response.played], seen, found


def test_a_trajectory_goes_on_elsewhere_with_an_environment_that_is_asked_for_its_turns_again():
    def prompt(left: Left) -> list[int]:
        return [*left.prompt.tolist(), *left.summary.tolist(), *left.observation.tolist()]

    for compaction in (None, Compaction(9, keep_ends(1, 3)), Compaction(6, prompt, ask=(60, 61))):
        whole, asked, found = play(compaction)
        assert (len(whole) > 3) == (compaction is not None), "sequences"
        assert [one[:2] for one in asked] == [(4, index) for index in range(4)]
        for before in found:
            again, asked_again, _ = play(compaction, before)
            without_times = [*again[:-1], replace(again[-1], seconds=())]
            assert without_times == [*whole[:-1], replace(whole[-1], seconds=())] and asked_again in (asked, [])
            (drawn,) = before.values()
            assert drawn.episode is not None and drawn.episode.before.played is not None
            is_last = drawn.episode.before.played.turns == 4
            assert asked_again == ([] if is_last else asked), "for none, if only an unanswered turn follows"
