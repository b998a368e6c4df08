"""How replicas share a batch, with engines that only count: who takes what, when, and what becomes of a replica that fails.

An answer is a function of the request's seed, so that all ways to share must give the same ones. One world of four ranks runs every
case, as four replicas of one rank and as two of two.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch.distributed as dist

from megappo.parallel.groups import meet
from megappo.parallel.meeting import RankIsLate
from megappo.rollout.generation import _Waiting, generate
from megappo.rollout.types import Replica, Request, Response, SamplingParams, Segment
from tests.rollout.responses import gather_responses
from tests.worlds import WorldError, spawn_world

RANKS = 4
SAMPLING = SamplingParams(max_tokens=16)
PREDICTED = [float(len(str(number)) + number % 7) for number in range(57)]  # has nothing to do with the lengths
COUNTS = (0, 1, 3, 16, 17, 57)  # four replicas of one rank run 16 requests at once, two replicas 8


def tokens_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100) for _ in range(rng.randint(1, SAMPLING.max_tokens))]


class CountingEngine:
    """An engine whose step takes `step_s` and gives every running request a token of its seed."""

    name = "counting"

    def __init__(self, replica: Replica, step_s: float = 0.0, meeting_s: float = 60.0) -> None:
        self.replica, self._meeting_s, self.step_s = replica, meeting_s, step_s
        self.running: dict[int, list[int]] = {}
        self.submitted: list[tuple[int, list[int]]] = []  # steps before, numbers
        self.ages: dict[int, int] = {}  # of the running requests, in steps
        self.steps, self.most, self.entered = 0, 0, 0

    def meet(self, before: str) -> None:
        meet(before, self._meeting_s)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        self.entered += 1
        yield

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    @property
    def num_running(self) -> int:
        return self.num_unfinished

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        assert requests, "nothing is submitted"
        self.submitted.append((self.steps, [request.number for request in requests]))
        self.running |= {request.number: tokens_of(request.seed) for request in requests}
        self.most = max(self.most, len(self.running))
        self.ages |= {request.number: 0 for request in requests}

    def poll(self) -> list[Response]:
        time.sleep(self.step_s)
        self.steps += 1
        self.ages = {number: self.ages[number] + 1 for number in self.running}
        done = [number for number, tokens in self.running.items() if self.ages[number] == len(tokens)]
        answers = [(number, numpy.array(self.running.pop(number), numpy.int32)) for number in done]
        return [
            Response(number, (Segment(tokens, numpy.zeros(len(tokens), numpy.float32), 0),), "stop")
            for number, tokens in answers
            if self.replica.answers(number)
        ]


class Requests(Sequence):
    """A batch whose requests are made when they are read. read: their numbers."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: Any) -> Any:
        self.read.append(number)
        return Request(number, (1, 2), seed=1000 + number)


def run(replica: Replica, count: int, step_s: float = 0.0, predicted: Sequence[float] | None = None) -> dict[str, Any]:
    engine, requests, finished = CountingEngine(replica, step_s), Requests(count), []

    def tell(some: list[Response]) -> None:
        finished.append((engine.num_unfinished, [response.number for response in some]))

    responses = generate(engine, requests, SAMPLING, tell, predicted)
    assert engine.num_unfinished == 0 and engine.entered == 1
    everything = gather_responses(responses, count)
    return {
        "mine": [response.number for response in responses],
        "tokens": [response.tokens.tolist() for response in everything],
        "read": requests.read,
        "submitted": engine.submitted,
        "most": engine.most,
        "finished": finished,
    }


def in_world(rank: int) -> dict[str, Any]:
    pairs, _ = dist.new_subgroups(2)
    replicas = {
        "four": Replica(rank, 4, None, 4),
        "unlimited": Replica(rank, 4, None, None),
        "two of two": Replica(rank // 2, 2, pairs, 4),
        "two of two, one at a time": Replica(rank // 2, 2, pairs, 1),
    }
    found = {(name, count): run(replica, count) for name, replica in replicas.items() for count in COUNTS}
    # The second half of the ranks is slow, in the replicas of two both of them or one that waits for nobody.
    found["four, slow"] = run(replicas["four"], 57, 0.05 if rank >= 2 else 0.0)
    found["two of two, slow"] = run(replicas["two of two"], 57, 0.05 if rank == 3 else 0.0)
    found["four, predicted"] = run(replicas["four"], 57, predicted=PREDICTED)
    found["two of two, predicted"] = run(replicas["two of two"], 57, predicted=PREDICTED)
    found["own counts"] = submitted_of_own_counts(replicas["two of two"])
    alone = Replica(0, 1, None, 4)
    if rank == 0:  # the only replica takes without the store
        found["alone"] = [taken_alone(alone, count) for count in COUNTS]
    found["missing"] = error_of(lambda: gather_responses([], 3))
    return found


def submitted_of_own_counts(replica: Replica) -> list[tuple[int, list[int]]]:
    """What a rank submits if each rank of a replica counts for itself. The same places are free on both, so nobody waits."""
    engine = CountingEngine(replica)
    with mock.patch.object(_Waiting, "_counted", lambda self, num: self._store.add("taken", num)):
        generate(engine, Requests(57), SAMPLING)
    return engine.submitted


def taken_alone(replica: Replica, count: int) -> list[int]:
    waiting, taken = _Waiting(count, replica), []
    while waiting:
        taken += waiting.take(3)
    return taken


def error_of(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def failing(rank: int, folder: str, tp: int, broken_rank: int) -> None:
    """The engine of a rank breaks; the others say that they miss it, and that rank ends once all have."""
    group = dist.new_subgroups(tp, timeout=timedelta(seconds=2.0))[0] if tp > 1 else None
    engine = CountingEngine(Replica(rank // tp, RANKS // tp, group, 4), meeting_s=2.0)

    def broken() -> list[Response]:
        raise ValueError("the engine broke")

    if rank == broken_rank:
        engine.poll = broken
    try:
        generate(engine, Requests(57), SAMPLING)
    except RankIsLate as error:
        Path(folder, f"told{rank}").write_text(str(error))
        time.sleep(60)
    except ValueError:
        while len(list(Path(folder).iterdir())) < RANKS - 1:
            time.sleep(0.05)
        raise


# ----------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def world() -> list[dict[Any, Any]]:
    return spawn_world(in_world, RANKS)


CASES = [(name, count) for name in ("four", "unlimited", "two of two", "two of two, one at a time") for count in COUNTS]
OTHERS = ("four, slow", "four, predicted", "two of two, slow", "two of two, predicted")


@pytest.mark.parametrize("case", [*CASES, *OTHERS])
def test_every_request_is_answered_once_and_alike_whoever_takes_it(world, case):
    count = case[1] if isinstance(case, tuple) else 57
    for result in world:
        assert result[case]["tokens"] == [tokens_of(1000 + number) for number in range(count)]
        assert result[case]["mine"] == sorted(result[case]["mine"])
    assert sorted(number for result in world for number in result[case]["mine"]) == list(range(count))


@pytest.mark.parametrize("case", [*CASES, *OTHERS])
def test_a_replica_reads_and_runs_only_what_it_answers(world, case):
    name = case[0] if isinstance(case, tuple) else case
    size = 2 if name.startswith("two") else 1
    for rank, result in enumerate(world):
        replica = world[rank - rank % size :][:size]
        answered = sorted(number for one in replica for number in one[case]["mine"])
        assert sorted(result[case]["read"]) == answered
        mine = [number for number in answered if number % size == rank % size]
        assert result[case]["mine"] == mine, "the ranks of a replica answer in turn"
        if name != "unlimited":
            assert result[case]["most"] <= (1 if name.endswith("time") else 4)


@pytest.mark.parametrize("case", [*(case for case in CASES if case[0].startswith("two")), *OTHERS[2:]])
def test_the_ranks_of_a_replica_submit_the_same_before_the_same_step(world, case):
    for first, second in (world[:2], world[2:]):
        assert first[case]["submitted"] == second[case]["submitted"]
    if case == "two of two, slow":
        assert len({before for before, _ in world[0][case]["submitted"]}) > 2, "it takes again and again"


def test_ranks_that_count_for_themselves_submit_other_requests(world):
    """Negative control of the test above."""
    replicas = [[result["own counts"] for result in pair] for pair in (world[:2], world[2:])]
    assert all(first[0] == second[0] for first, second in replicas), "their own share needs no count"
    # On a busy machine one of the replicas may take all the rest before the other has drawn its first.
    assert any(first != second for first, second in replicas)


def test_a_batch_that_fits_is_dealt_out_at_once_and_evenly(world):
    for name, replicas in (("four", 4), ("unlimited", 4)):
        for count in (1, 3, 16):
            sizes = [len(result[name, count]["mine"]) for result in world]
            assert max(sizes) - min(sizes) <= 1 and all(len(result[name, count]["submitted"]) <= 1 for result in world)
    together = [result["unlimited", 57]["mine"] for result in world]
    assert sum(together, []) == list(range(57)), "neighbours, which share a prompt, stay together"


def test_a_slow_replica_takes_fewer(world):
    for case, slow, fast in (("four, slow", (2, 3), (0, 1)), ("two of two, slow", (2,), (0,))):
        sizes = [len(result[case]["read"]) for result in world]
        assert all(sizes[one] >= 4 for one in slow), "its own share"
        assert max(sizes[one] for one in slow) < min(sizes[one] for one in fast)


def test_the_only_replica_takes_in_order(world):
    assert world[0]["alone"] == [list(range(count)) for count in COUNTS]


def test_responses_are_told_as_they_finish(world):
    for result in world:
        told = result["four", 57]["finished"]
        assert sorted(sum((numbers for _, numbers in told), [])) == result["four", 57]["mine"]
        assert any(unfinished for unfinished, _ in told), "while others are generated"


def test_a_response_that_is_missing_is_an_error(world):
    assert all(result["missing"] == "no replica answered request 0 (3 of 3 in all)" for result in world)


def told_by_others(folder: Path, tp: int, broken_rank: int) -> dict[int, str]:
    with pytest.raises(WorldError, match=rf"rank {broken_rank} failed first:(?s:.*)the engine broke"):
        spawn_world(failing, RANKS, str(folder), tp, broken_rank)
    told = {int(path.name.removeprefix("told")): path.read_text() for path in folder.iterdir()}
    assert set(told) == set(range(RANKS)) - {broken_rank}
    return told


def test_a_replica_that_fails_is_missed_by_all_others(tmp_path):
    for text in told_by_others(tmp_path, 1, 1).values():
        assert "waited for rank 1 before the end of generation (run.timeouts.meeting_s = 2)" in text


def test_the_first_rank_of_a_replica_is_missed_by_its_others(tmp_path):
    told = told_by_others(tmp_path, 2, 2)
    assert told[3].startswith("rank 3 waited for rank 2 to take requests for their replica: ")
    assert all("waited for ranks 2-3 before the end of generation" in told[rank] for rank in (0, 1))
