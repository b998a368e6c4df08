"""The rollout half of an asynchronous run, real vLLM with two replicas and then with one of tp 2; rank 0 stands for the training
half: it admits steps, pushes weights of given versions and takes the responses.

Oracles: `generate` of the synchronous run for staleness 0, the run itself for its replay and its resume. All runs of the module are
in one world.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch.distributed as dist

from megappo.bridge.sync import WeightSync
from megappo.config.run_sections import TimeoutsConfig
from megappo.data.prompts import Prompt
from megappo.rollout.batches import FIRST_EVALUATION
from megappo.rollout.channel import Channel
from megappo.rollout.episodes import Episodes
from megappo.rollout.event_log import Change, EventLog, read_changes, read_script
from megappo.rollout.generation import generate
from megappo.rollout.hand_over import take_responses, take_snapshots
from megappo.rollout.meetings import Guests, Hosts, Seats
from megappo.rollout.server import RequestSource, _Server, serve
from megappo.rollout.snapshot import Snapshot
from megappo.rollout.subworld import prepare_rollout_world
from megappo.rollout.turn import Turn
from megappo.rollout.turns import Answer, Asked, TurnsRollout
from megappo.rollout.types import BATCH, Context, KeptIds, Played, Replica, Request, Response, Routes, SamplingParams
from megappo.rollout.vllm_engine import VllmEngine
from megappo.rollout.vllm_outputs import Drawn, Episode
from megappo.runtime.failure import ATTEMPT_DIR, SPARE_RANKS, note_joining
from tests.models.checkpoints import write_checkpoint
from tests.rollout.held_versions import END, Held, distances, parts_of
from tests.rollout.responses import kept_of, plain, segment
from tests.worlds import spawn_world

STEPS, ROWS, SAMPLES, STALENESS, SAVED = 5, 4, 2, 2, 2
GIVEN_UP = 4  # step before which a replica is: one hand-over, of an evaluation, after push 3
BACK = 2  # version with which a replica takes part again that was given up before this step
SAMPLING = SamplingParams(max_tokens=40, temperature=0.9)
TOLERANCE = 1e-5  # as in `test_push_while_running.py`
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
OF_TURNS = SamplingParams(max_tokens=90, temperature=0.9, stop_token_ids=tuple(range(0, 131, 7)))
LIMITS: dict[str, Any] = {"max_turns": 4, "turn_tokens": 20, "max_prompt_tokens": 40}
HEADER = {"facts": "of this run"}


RECORD = Prompt("p#0", (), "", "", {})


def prompt(row: int) -> tuple[int, ...]:
    return tuple(random.Random(row).randrange(3, 131) for _ in range(5 + row % 17))


def rows_of(step: int) -> list[int]:
    return [step * ROWS + place for place in range(ROWS)]


def of_step(step: int, rows: Sequence[int], before: int = 0) -> list[Request]:
    """Requests of a step: most of them short, some long."""
    lengths = random.Random(step)
    return [
        Request(
            i,
            prompt(rows[i // SAMPLES]),
            1000 * step + i,
            i // SAMPLES,
            max_tokens=min(40, int(2 + lengths.expovariate(0.1))),
            source=RECORD,
        )
        for i in range(len(rows) * SAMPLES)
    ]


def of_evaluation(name: str) -> tuple[list[Request], SamplingParams]:
    return [Request(i, prompt(100 + i), i, i, source=RECORD) for i in range(6)], GREEDY


SOURCE = RequestSource(of_step, of_evaluation, SAMPLING, lambda name, step, rows: (of_step(step, rows), SAMPLING))
TURNS = replace(SOURCE, sampling=OF_TURNS, of_evaluation=lambda name: (of_evaluation(name)[0], replace(OF_TURNS, temperature=0.0)))


class Digests:
    """An environment of processes that answers by all turns so far, which it keeps as its state, after up to 40 ms. forbidden: it
    may not be asked."""

    def __init__(self, forbidden: bool = False) -> None:
        self._pool, self._forbidden, self.asked = ThreadPoolExecutor(4), forbidden, []

    def start(self, turn: Turn) -> Asked:
        assert not self._forbidden, "a replay asks nothing"
        self.asked.append((turn.seed, turn.index))
        turns = turn.memo.setdefault("turns", [])
        turns.append(turn.tokens.tolist())
        future = self._pool.submit(time.sleep, 0.04 * random.random())
        answer = Answer(answer_to(turns), random.random())
        return Asked(future, lambda: answer)

    def close(self) -> None:
        self._pool.shutdown()


class Judge:
    """Rewards that take up to 40 ms, and score by chance: a repetition can only have them from the log. forbidden: as of
    `Digests`."""

    def __init__(self, forbidden: bool) -> None:
        self._pool, self._forbidden, self._begun = ThreadPoolExecutor(2), forbidden, {}

    def start(self, number: int, response: Response, prompt: Prompt) -> None:
        assert not self._forbidden and prompt is RECORD and response.number == number and response.verdicts is None
        self._begun[number] = self._pool.submit(time.sleep, 0.04 * random.random())

    def take(self) -> dict[int, dict[str, list[Any]]]:
        done = [number for number, future in self._begun.items() if future.done()]
        self._begun = {number: future for number, future in self._begun.items() if number not in done}
        return {number: {"judge": [random.random(), {}, None, None, 0.1, None]} for number in done}

    def close(self) -> None:
        self._pool.shutdown()


def answer_to(turns: Sequence[Sequence[int]]) -> list[int] | None:
    """Ids that only the same turns give; a few trajectories end after two."""
    digest = zlib.crc32(repr(turns).encode())
    return None if len(turns) == 2 and digest % 5 == 0 else [digest % 131, digest // 131 % 131]


# ------------------------------------------------------------------------------------------------------------- in the world


class Pauses:
    """Random waits of up to `most_s` on this rank."""

    def __init__(self, most_s: float, seed: int) -> None:
        self._most_s, self._random = most_s, random.Random(seed)

    def __call__(self) -> None:
        time.sleep(self._random.random() * self._most_s)


class Unwatched:
    def go_on_with(self, ranks: Any, spare: Any) -> None:
        """No watchdog."""

    def take_in(self, members: Any) -> None:
        assert [member.rank for member in members] == [0, 1, 2]


class Run:
    """One run, as every rank sees it. tp: of its engine. staleness: steps ahead. pause_s: longest on each side, random. script: run
    to replay. restored: run from whose checkpoint behind step SAVED it goes on. steps: the last one. A run called kept keeps the
    cache at pushes."""

    def __init__(
        self,
        held: Held,
        name: str,
        tp: int,
        staleness: int,
        pause_s: float,
        script: str = "",
        restored: str = "",
        steps: int = STEPS,
    ) -> None:
        self.held, self.tp = held, tp
        self.name, self.staleness, self.script, self.restored, self.steps = name, staleness, script, restored, steps
        self.pause = Pauses(pause_s, sum(name.encode()) + dist.get_rank())

    def meet(self, kind: Any, folder: Path) -> None:
        """Begin, on all ranks."""
        store: Any = dist.PrefixStore(self.name, dist.distributed_c10d._get_default_store())
        leaders = list(range(1, 3, self.tp))
        self.channel = Channel(store, dist.get_rank(), leaders, 60.0)
        given = () if kind is Guests or not self.script else (self.changes(folder),)
        self.meetings: Any = kind(self.channel, Seats(1, self.tp, len(leaders)), TimeoutsConfig(), Unwatched(), *given)

    def changes(self, folder: Path) -> list[Change]:
        """Of the run that is replayed."""
        return read_changes([folder / f"{self.script}-{replica}.log" for replica in range(2)])

    def train(self, sync: WeightSync, folder: Path) -> dict[str, Any]:
        """The training half, on rank 0."""
        self.sync = sync
        self.found: dict[str, Any] = {"steps": {}, "figures": [], "verdicts": {}}
        done = SAVED if self.restored else 0
        admitted = done + self.staleness if self.restored else 0
        if self.restored:
            steps = {step: rows_of(step) for step in range(done + 1, admitted + 1)}
            self.channel.tell("restore", path=str(folder / self.restored), steps=steps)
        self.push(done)
        for step in range(done + 1, self.steps + 1):
            while admitted < min(step + self.staleness, STEPS):
                admitted += 1
                self.channel.tell("requests", step=admitted, rows=rows_of(admitted))
            if (step, self.name) in ((GIVEN_UP, "given up"), (BACK, "back")):
                self.channel.give_up(1, "by a test")
            self.found["steps"][step] = self.take(f"step/{step}")
            self.pause()
            self.push(step)
            if step == 3 and "average" in self.name:
                self.push(-1 - step)
            if step == 3:
                self.channel.tell("evaluation", key=f"evaluation/{step}/held out", set="held out")
                self.found["evaluation"] = self.take(f"evaluation/{step}/held out")
            if step == 3 and "average" in self.name:
                self.push(step)
            if step == SAVED:
                self.found["snapshots"] = self.hold("snapshot", lambda: take_snapshots(self.channel.leaders))
                (folder / self.name).mkdir()
                for replica, data in self.found["snapshots"].items():
                    (folder / self.name / f"rollout-{replica}.bin").write_bytes(data)
        self.channel.tell("stop", finished=self.steps == STEPS)
        self.meetings.leave()
        return self.found

    def push(self, version: int) -> None:
        self.meetings.drop_lost(self.rebuild)
        while version == BACK and self.name == "back" and not self.channel.is_ready(1):
            time.sleep(0.01)
        begun = {step: rows_of(step) for step in range(version + 1, min(version + self.staleness, STEPS) + 1)}
        self.meetings.take_in(self.rebuild, begun)
        self.hold("push", lambda: self.held.send(self.sync, version), version=version, recompute=version == SAVED)
        self.meetings.count(version)

    def rebuild(self, destinations: tuple[int, ...]) -> None:
        self.found["before"] = self.spare()
        self.sync = self.sync.rerouted(destinations)

    def spare(self) -> str:
        return Path(os.environ[ATTEMPT_DIR], SPARE_RANKS).read_text("utf-8")

    def hold(self, kind: str, action: Callable[[], Any], **fields: Any) -> Any:
        counts, found = self.meetings.hold(kind, action, **fields)
        assert counts
        return found

    def take(self, key: str) -> dict[int, list]:
        self.meetings.drop_lost(self.rebuild)
        self.channel.wait_for(key, key)
        responses, figures = self.hold("hand_over", take_responses, key=key)
        self.meetings.count()
        self.found["figures"] += figures
        self.found["verdicts"][key] = {one.number: one.verdicts for one in responses}
        return segments(responses)

    def serve(self, engine: VllmEngine, folder: Path) -> str | None:
        """The rollout half; return the log of this rank's replica, None where it has none."""
        self.meet(Guests, folder)

        replica = engine.replica.index

        def log_of(name: str) -> Path:
            return folder / f"{name}-{replica}.log"

        def read(path: str) -> list[bytes]:
            return [file.read_bytes() for file in Path(path).glob("rollout-*.bin")]

        with engine.in_world():
            if engine.replica.group is not None:
                dist.barrier(engine.replica.group)  # the leader has ended the log of the run before, which the others read too
            path = log_of(self.name) if engine.replica.is_leader else None
        was_lost = bool(self.script) and [not one.joins for one in self.changes(folder) if replica in one.replicas][-1:] == [True]
        script = read_script(log_of(self.script), HEADER, was_lost=was_lost) if self.script else ()
        if self.restored and path is not None and log_of(self.restored).exists():
            shutil.copy(log_of(self.restored), path)  # with what the killed run wrote after the checkpoint
        digests, judge = Digests(forbidden=bool(script)), Judge(forbidden=bool(script))
        played, source = (Episodes(engine, digests, **LIMITS), TURNS) if "turns" in self.name else (engine, SOURCE)
        with mock.patch.object(engine, "_cache_after_push", "keep" if "kept" in self.name else "recompute"):
            rewards = judge if "turns" in self.name and path is not None else None
            events = EventLog(path, HEADER, script)
            finished = serve(played, self.meetings, source, events, read, self.pause, rewards)
            self.meetings.leave()
            if not finished:  # a process of its own would end
                with engine.between_pushes():
                    engine.drop()
            if self.name == "back" and replica == 1:
                finished = self.serve_again(engine, folder, events)
        self.meetings.leave()
        digests.close()
        judge.close()
        self.asked = digests.asked
        assert finished == (self.steps == STEPS and not ("given up" in self.name and replica == 1))
        return None if path is None else path.read_text("utf-8")

    def serve_again(self, engine: VllmEngine, folder: Path, events: Any) -> bool:
        """The rollout half in a process that takes the place of a lost one, as far as that is possible here."""
        events._file.close()
        events._path.write_bytes(events._path.read_bytes() + b"a 3 5")  # killed in the middle of a line
        self.channel = Channel(self.channel._store, self.channel.rank, self.channel.leaders, 60.0)
        seats = self.meetings.seats
        self.meetings = Guests(self.channel, seats, TimeoutsConfig(), Unwatched(), joins=True)
        with mock.patch.object(engine, "_sync", None):
            engine.connect_later(self.held.route(1), 1, 2)
            (folder / f"rank-{self.channel.rank}.lost").write_text("137 0 0 here\n")  # of the process before
            note_joining(folder, self.channel.rank, 1)
            again = EventLog(events._path, HEADER)
            again.begin_again()
            return serve(engine, self.meetings, SOURCE, again, lambda path: [], self.pause, joins=True)


def segments(responses: Sequence[Response]) -> dict[int, list]:
    return {one.number: parts_of(one) for one in responses}


def synchronous(held: Held, engine: VllmEngine, source: RequestSource = SOURCE) -> dict[str, Any]:
    """The oracle of staleness 0: `generate` between two pushes, on the ranks of the engine."""
    digests, steps = Digests(), dict[int, dict]()
    rollout: Any = engine if source is SOURCE else TurnsRollout(engine, digests, **LIMITS)
    for step in range(1, STEPS + 1):
        held.push(engine, step - 1)
        with engine.in_world():
            steps[step] = segments(generate(rollout, source.of_step(step, rows_of(step), 0), source.sampling))
            if step == 4:
                evaluation = segments(generate(rollout, *source.of_evaluation("held out")))
    digests.close()
    return {"steps": steps, "evaluation": evaluation}


# tp of the engine -> its runs
RUNS: dict[int, tuple[tuple, ...]] = {
    1: (
        ("in step", 1, 0, 0.02),
        ("ahead", 1, STALENESS, 0.02),
        ("other pauses", 1, STALENESS, 0.06),
        ("replayed", 1, STALENESS, 0.04, "ahead"),
        ("resumed", 1, STALENESS, 0.03, "ahead", "ahead"),
        ("kept", 1, STALENESS, 0.02),
        ("kept, resumed", 1, STALENESS, 0.03, "kept", "kept"),
        ("turns, in step", 1, 0, 0.02),
        ("turns", 1, STALENESS, 0.02),
        ("turns, replayed", 1, STALENESS, 0.04, "turns"),
        ("turns, resumed", 1, STALENESS, 0.03, "turns", "turns"),
        ("stopped", 1, STALENESS, 0.0, "", "", 2),
        ("given up", 1, STALENESS, 0.02),
        ("given up, replayed", 1, STALENESS, 0.04, "given up"),
        ("average", 1, STALENESS, 0.02),
        ("average, replayed", 1, STALENESS, 0.04, "average"),
        ("back", 1, STALENESS, 0.02),
        ("back, replayed", 1, STALENESS, 0.04, "back"),
    ),
    2: (
        ("in step, tp 2", 2, 0, 0.02),
        ("dealt anew", 2, STALENESS, 0.0, "", "ahead"),
        ("turns, tp 2", 2, STALENESS, 0.02),
        ("turns, tp 2, replayed", 2, STALENESS, 0.0, "turns, tp 2"),
        ("turns, dealt anew", 2, STALENESS, 0.0, "", "turns"),
    ),
}


def in_world(rank: int, path: str, folder: Path) -> dict[str, Any]:
    held, alone, found = Held(path), prepare_rollout_world([0]), {}
    os.environ[ATTEMPT_DIR] = str(folder)
    for tp, settings in RUNS.items():
        runs = [Run(held, *one) for one in settings]
        if alone is not None:
            sync = held.connect(tp)
            held.serve(sync)
            for run in runs:
                run.meet(Hosts, folder)
                # It looks for losses all the time.
                with alone.installed() as outside, mock.patch("megappo.rollout.meetings._LOOK_S", 0.0):
                    run.meetings.outside = outside
                    found[run.name] = run.train(sync, folder)
            continue
        with held.engine(tp, max_num_seqs=4) as engine:
            found[f"synchronous, tp {tp}"] = synchronous(held, engine)
            if tp == 1:
                found["synchronous turns, tp 1"] = synchronous(held, engine, TURNS)
            held.ask(END)
            for run in runs:
                with mock.patch.object(engine, "_sync", engine._sync):  # without a lost replica it is another
                    found[run.name] = run.serve(engine, folder)
                found[f"asked in {run.name}"] = run.asked
    return found


# ------------------------------------------------------------------------------------------------------------------ tests


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "llama", head_dim=32)
    return str(folder)


@pytest.fixture(scope="module")
def world(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn_world(in_world, 3, checkpoint, tmp_path_factory.mktemp("runs"))


def logs(world: list[dict[str, Any]], name: str) -> list[str]:
    return [rank[name] for rank in world[1:]]


def test_staleness_0_with_pauses_on_both_sides_is_the_synchronous_run(world):
    for tp, name in ((1, "in step"), (2, "in step, tp 2"), (1, "turns, in step")):
        kind = "synchronous turns" if "turns" in name else "synchronous"
        ranks = [rank[f"{kind}, tp {tp}"] for rank in world[1:]]
        assert world[0][name]["steps"] == {s: ranks[0]["steps"][s] | ranks[1]["steps"][s] for s in ranks[0]["steps"]}
        assert world[0][name]["evaluation"] == ranks[0]["evaluation"] | ranks[1]["evaluation"]


def test_a_replay_of_the_log_is_the_run_and_its_log(world):
    ahead, replayed, other = (world[0][name] for name in ("ahead", "replayed", "other pauses"))
    assert replayed["steps"] == ahead["steps"] and logs(world, "replayed") == logs(world, "ahead")
    assert other["steps"] != ahead["steps"], "negative control: nothing but the log makes them equal"
    requests = STEPS * ROWS * SAMPLES + len(of_evaluation("held out")[0])
    assert sum(len(text.split("\n", 1)[1]) for text in logs(world, "ahead")) < 20 * requests, "bytes a sample"


def test_a_resume_from_a_push_is_the_uninterrupted_run(world):
    for name, again in (("ahead", "resumed"), ("kept", "kept, resumed")):
        steps = world[0][name]["steps"]
        assert world[0][again]["steps"] == {step: steps[step] for step in range(SAVED + 1, STEPS + 1)}
        assert logs(world, again) == logs(world, name), "what came after the checkpoint was cut off and done again"
    parts = [Snapshot.decoded(data) for data in world[0]["ahead"]["snapshots"].values()]
    begun = sum(1 for part in parts for drawn in part.running.values() if drawn.segments)
    assert begun and any(part.finished for part in parts), "negative control: there was something to lose"


def sampled_of(parts: Sequence[tuple]) -> list[list[int]]:
    """The turns of a trajectory: neighbouring segments that were drawn are one."""
    runs = [(given, list(run)) for given, run in groupby(parts, key=lambda one: one[1] is None)]
    return [[token for tokens, _, _ in run for token in tokens] for given, run in runs if not given]


def test_turns_go_on_over_pushes_and_are_answered_by_all_that_was_drawn(world, checkpoint):
    found, cut = world[0]["turns"], 0
    for step, batch in found["steps"].items():
        prompts: dict[int, Any] = {one.number: one.prompt for one in of_step(step, rows_of(step))}
        assert max(distances(checkpoint, prompts, batch, OF_TURNS.temperature)) < TOLERANCE
        for parts in batch.values():
            turns, given = sampled_of(parts), [tokens for tokens, logprobs, _ in parts if logprobs is None]
            assert given == [answer_to(turns[:number]) for number in range(1, len(given) + 1)]
            cut += sum(len(list(run)) - 1 for sampled, run in groupby(parts, key=lambda one: one[1] is not None) if sampled)
            versions = [version for _, logprobs, version in parts if logprobs is not None]
            assert versions == sorted(versions) and step - 1 - STALENESS <= versions[0] and versions[-1] <= step - 1
    assert cut > 4 and sum(one["requests_cut"] for one in found["figures"]) > 4
    assert max(len(sampled_of(parts)) for batch in found["steps"].values() for parts in batch.values()) == LIMITS["max_turns"]


def test_a_replay_takes_the_answers_from_the_log(world, tmp_path):
    for name, again in (("turns", "turns, replayed"), ("turns, tp 2", "turns, tp 2, replayed")):
        assert world[0][again]["steps"] == world[0][name]["steps"] and logs(world, again) == logs(world, name)
        assert world[0][again]["verdicts"] == world[0][name]["verdicts"], "and the verdicts, which are of chance"
        assert any(rank[f"asked in {name}"] for rank in world[1:]) and not any(rank[f"asked in {again}"] for rank in world[1:])
    text, path = logs(world, "turns")[0], tmp_path / "replica-0.log"
    (answer, *_) = [line for line in text.splitlines() if line.startswith("o ")]
    path.write_text(text.replace(answer, re.sub(r"\[\[\d+", "[[3", answer), 1), "utf-8")
    with pytest.raises(ValueError, match="was changed: its events have another sum than its end says") as error:
        read_script(path, HEADER)
    assert "\n" not in str(error.value)


def test_a_resume_in_the_middle_of_trajectories_is_the_uninterrupted_run(world):
    steps, later = world[0]["turns"]["steps"], range(SAVED + 1, STEPS + 1)
    assert world[0]["turns, resumed"]["steps"] == {step: steps[step] for step in later}
    assert logs(world, "turns, resumed") == logs(world, "turns")
    verdicts = world[0]["turns"]["verdicts"]
    assert world[0]["turns, resumed"]["verdicts"] == {key: verdicts[key] for key in world[0]["turns, resumed"]["verdicts"]}
    for name in ("turns", "turns, dealt anew"):
        of_steps = [one for key, batch in world[0][name]["verdicts"].items() if "step" in key for one in batch.values()]
        assert all(one is not None and 0 <= one["judge"][0] < 1 for one in of_steps), "each response of a step once"
    parts = [Snapshot.decoded(data) for data in world[0]["turns"]["snapshots"].values()]
    episodes: dict[int, Any] = {number: drawn for part in parts for number, drawn in part.running.items()}
    assert any(drawn.episode.before.segments and drawn.segments for drawn in episodes.values()), "control: in the middle of a turn"
    saved = {one.number: one.verdicts for part in parts for one in part.finished if one.verdicts is not None}
    for name in ("turns, resumed", "turns, dealt anew"):
        found = world[0][name]["verdicts"]
        assert all(found[f"step/{n // BATCH}"][n % BATCH] == one for n, one in saved.items()), "those of a checkpoint count"
    asked = [one for rank in world[1:] for one in rank["asked in turns, dealt anew"]]
    assert len(set(asked)) == len(asked), "once in this process"
    for step in later:
        for number, trajectory in world[0]["turns, dealt anew"]["steps"][step].items():
            turns, given = sampled_of(trajectory), [tokens for tokens, logprobs, _ in trajectory if logprobs is None]
            assert given == [answer_to(turns[:number]) for number in range(1, len(given) + 1)], "by its state of before"
            begun = episodes.get(step * BATCH + number, Drawn())
            before = [] if begun.episode is None else [*begun.episode.before.segments, *begun.segments]
            assert trajectory[: len(before)] == parts_of(Response(0, tuple(before), "stop")), "nothing is drawn again"


def test_two_replicas_requests_go_on_in_one_exactly_once(world):
    found, parts = world[0]["dealt anew"]["steps"], [Snapshot.decoded(one) for one in world[0]["ahead"]["snapshots"].values()]
    assert {step: sorted(batch) for step, batch in found.items()} == {s: list(range(ROWS * SAMPLES)) for s in (3, 4, 5)}
    begun = {number: drawn.segments for part in parts for number, drawn in part.running.items()}
    begun |= {one.number: one.segments for part in parts for one in part.finished}
    for number, drawn in begun.items():
        batch, place = divmod(number, BATCH)
        assert found[batch][place][: len(drawn)] == parts_of(Response(number, drawn, "stop")), "nothing is drawn again"
    assert '"resumed": true' in logs(world, "dealt anew")[0], "its requests were dealt otherwise: no replay from the start"


def test_a_replica_draws_what_a_lost_one_had_begun_from_its_last_snapshot(world, checkpoint):
    found = world[0]["given up"]
    assert {step: sorted(batch) for step, batch in found["steps"].items()} == {
        step: list(range(ROWS * SAMPLES)) for step in range(1, STEPS + 1)
    }
    begun = []
    for step, batch in found["steps"].items():
        prompts: dict[int, Any] = {one.number: one.prompt for one in of_step(step, rows_of(step))}
        assert max(distances(checkpoint, prompts, batch, SAMPLING.temperature)) < TOLERANCE
        versions = {number: [version for _, _, version in parts] for number, parts in batch.items()}
        assert all(step - 1 - STALENESS <= min(one) and max(one) <= step - 1 for one in versions.values())
        begun += [
            one for number, one in versions.items() if step >= GIVEN_UP and number // SAMPLES % 2 == 1 and one[0] < GIVEN_UP - 1
        ]
    assert begun, "begun by weights that were gone when the replica was given up: only its snapshot had such tokens"
    assert found["before"] == "2", "and the last replica is not spare"
    assert re.search(r"^l \d+ 1 \[3,1,\[1\]\]$", logs(world, "given up")[0], re.MULTILINE)


def test_a_replay_loses_the_replica_again(world):
    assert world[0]["given up, replayed"]["steps"] == world[0]["given up"]["steps"]
    assert world[0]["given up, replayed"]["evaluation"] == world[0]["given up"]["evaluation"]
    assert logs(world, "given up, replayed")[0] == logs(world, "given up")[0]


def test_an_evaluation_of_other_weights_than_a_steps_draws_nothing_else_with_them(world, checkpoint):
    found, prompts = world[0]["average"], dict[int, Any]((one.number, one.prompt) for one in of_evaluation("held out")[0])
    assert {version for parts in found["evaluation"].values() for _, _, version in parts} == {-4}
    assert max(distances(checkpoint, prompts, found["evaluation"], 1.0)) < TOLERANCE
    cut = 0
    for step, batch in found["steps"].items():
        of_numbers: dict[int, Any] = {one.number: one.prompt for one in of_step(step, rows_of(step))}
        assert max(distances(checkpoint, of_numbers, batch, SAMPLING.temperature)) < TOLERANCE
        versions = [[version for _, _, version in parts] for parts in batch.values()]
        assert sorted(batch) == list(range(ROWS * SAMPLES)) and min(map(min, versions)) >= 0
        cut += sum(one.count(3) > 0 and min(one) < 3 for one in versions)
    assert cut, "control: some ran when the average came"
    for text in logs(world, "average"):
        assert re.search(r"^p \d+ 3\n(a .*\n)*p \d+ -4\n(a \d+ 1000000.*\n|h .*\n)*p 0 3$", text, re.MULTILINE), text
    for name in ("steps", "evaluation"):
        assert world[0]["average, replayed"][name] == found[name]
    assert logs(world, "average, replayed") == logs(world, "average")


def test_a_lost_replica_takes_part_again_from_a_push(world, checkpoint):
    found = world[0]["back"]
    numbers = {step: list(range(ROWS * SAMPLES)) for step in range(1, STEPS + 1)}
    assert {step: sorted(batch) for step, batch in found["steps"].items()} == numbers
    for step, batch in found["steps"].items():
        prompts: dict[int, Any] = {one.number: one.prompt for one in of_step(step, rows_of(step))}
        assert max(distances(checkpoint, prompts, batch, SAMPLING.temperature)) < TOLERANCE
        assert all(step - 1 - STALENESS <= version <= step - 1 for parts in batch.values() for _, _, version in parts)
    first, second = logs(world, "back")
    # The replica that stayed may go on between the two meetings, if the push comes late.
    assert re.search(r"^l \d+ 1 \[1,0,\[1\]\]\n(.*\n)*j \d+ 1 \[1,1,\[1\]\]\n(a .*\n)*r \d+ 2$", first, re.MULTILINE), first
    before, after = second.split("\nx 0 0\n")
    assert re.findall(r"^a \d+ (\d)", before, re.MULTILINE) and after.startswith("j 0 1 [1,1,[1]]\nr 0 2\n")
    assert set(re.findall(r"^a \d+ (\d+)", after, re.MULTILINE)) == {"5", str(FIRST_EVALUATION)}, "of later batches alone"
    assert found["evaluation"] == world[0]["in step"]["evaluation"]
    assert all(Snapshot.decoded(data).is_dealt_anew for data in found["snapshots"].values()), "no resume is on its log"


def test_a_replay_loses_the_replica_and_has_it_again(world):
    assert world[0]["back, replayed"]["steps"] == world[0]["back"]["steps"]
    assert logs(world, "back, replayed") == logs(world, "back")


def test_every_token_is_of_a_version_that_its_step_may_have(world, checkpoint):
    ages = []
    for step, batch in world[0]["ahead"]["steps"].items():
        prompts: dict[int, Any] = {one.number: one.prompt for one in of_step(step, rows_of(step))}
        assert max(distances(checkpoint, prompts, batch, SAMPLING.temperature)) < TOLERANCE
        ages += [step - 1 - version for parts in batch.values() for _, _, version in parts]
    assert min(ages) == 0 and max(ages) == STALENESS
    figures = world[0]["ahead"]["figures"]
    assert sum(one["requests_cut"] for one in figures) > 4 and sum(one["tokens_recomputed"] for one in figures) > 50
    in_step = world[0]["in step"]["figures"]
    assert sum(one["requests_cut"] for one in in_step) == 0 < sum(one["idle_s"] for one in in_step)


def test_an_evaluation_is_drawn_by_one_version_beside_what_runs(world):
    ahead = world[0]["ahead"]
    assert ahead["evaluation"] == world[0]["in step"]["evaluation"] and len(ahead["evaluation"]) == 6
    assert {version for parts in ahead["evaluation"].values() for _, _, version in parts} == {3}
    submitted: list[int] = []
    engine: Any = SimpleNamespace(
        replica=Replica(0, 2, None, 4),
        in_world=contextlib.nullcontext,
        num_running=0,
        submit=lambda requests, *_: submitted.extend(one.number for one in requests),
    )
    channel: Any = SimpleNamespace(announce=None)
    meetings: Any = SimpleNamespace(channel=channel, seats=Seats(1, 1, 2), of=lambda *_: None)
    server = _Server(engine, meetings, SOURCE, EventLog(None, HEADER), lambda path: [])
    server._admit(1, rows_of(1))
    server._begin_first(FIRST_EVALUATION, "evaluation/0/held out", *of_evaluation("held out"))
    server._begin()
    first = FIRST_EVALUATION * BATCH
    assert submitted == [first, first + 2, first + 4, BATCH], "before what waits, each on its replica"


def test_a_log_of_another_run_or_without_its_end_is_refused(world, tmp_path):
    text, path = logs(world, "ahead")[0], tmp_path / "replica-0.log"
    lines = text.splitlines(keepends=True)
    for written, words in (
        (text.replace("of this run", "of another"), "is of a run with facts = of another, not of this run"),
        ("".join(lines[:-1]), "is cut: it has no end"),
        (text[:-2], "is cut: it has no end"),
        (text.replace("p 0 0", "p 0 1", 1), "was changed: its events have another sum"),
        (text.replace("false", "true", 1), "begins at a resume with other replicas"),
        ("a 3 1.0 1\n", "is no event log"),
        (None, "is no event log"),
    ):
        path.unlink(missing_ok=True) if written is None else path.write_text(written, "utf-8")
        with pytest.raises(ValueError, match=words) as error:
            read_script(path, HEADER)
        assert "\n" not in str(error.value)
    path.write_text(text, "utf-8")
    events = read_script(path, HEADER)
    assert events[1][:4] == ("a", 0, 1 * BATCH, 4) and events[-1].kind == "e" and len(events) == len(lines) - 1


def test_a_log_on_a_full_disk_ends_no_run(caplog):
    log = EventLog(Path("/dev/full"), HEADER)
    log.begin()
    log.push(0, 0, recompute=False)
    log.requests(2, [5])
    log.push(3, 1, recompute=False)
    log.end(5)
    assert log.num_events == 4, "a snapshot says how many there must be"
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/full cannot be written (No space left on device): this run cannot be replayed"
    ]


def test_a_snapshot_is_a_file_without_pickles_and_comes_back_whole():
    drawn = Drawn((segment([5, 6], [-0.5, -1.5], 3), segment([7], [-0.25], 4)), (kept_of([[5, 9], [6]]), kept_of([[7, 8, 9]])))
    routes = Routes(2, numpy.array([[1, 300], [2, 3]], numpy.int16))
    done = Response(2 * BATCH + 1, drawn.segments[1:], "length", kept_of([[7, 8, 9]]), routes=routes)
    given = segment([8, 8], None, 3)
    before = replace(done, segments=(*drawn.segments, given), played=Played(1, (0.1,), False, False), fault="no tool")
    context = Context(numpy.array([4], numpy.int32), drawn.segments, kept_of([[5], [6], [7]]))
    before = replace(before, contexts=(context,), prompt=numpy.array([9, 9], numpy.int32))
    episode = Drawn(drawn.segments[:1], drawn.kept[:1], Episode(before, done, numpy.array([7], numpy.int32)))
    running = {3 * BATCH: drawn, 3 * BATCH + 1: Drawn(), 3 * BATCH + 2: episode}
    data = Snapshot(1, 2, 300, 40, running, [done]).encoded()
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        assert all(name.endswith(".npy") and file.read(name)[:6] == b"\x93NUMPY" for name in file.namelist())
    found = Snapshot.decoded(data)
    assert (found.replica, found.num_evaluations, found.engine_step, found.num_events) == (1, 2, 300, 40)
    assert list(found.running) == list(running) and found.running[3 * BATCH + 1] == Drawn()
    again: Any = found.finished[0].routes
    assert (again.first, again.experts.dtype, again.experts.tolist()) == (2, numpy.int16, [[1, 300], [2, 3]])
    parts: Any = found.running[3 * BATCH + 2]
    segments, kept, of_episode = parts
    assert of_episode is not None and of_episode.turn is not None and of_episode.observation.tolist() == [7]
    assert plain([of_episode.before, of_episode.turn]) == plain([before, done]) and of_episode.before.fault == "no tool"
    assert plain([Response(0, segments, "stop", *kept)]) == plain([Response(0, drawn.segments[:1], "stop", drawn.kept[0])])
    again = Response(0, found.running[3 * BATCH].segments, "stop", KeptIds.joined(found.running[3 * BATCH].kept))
    assert plain([again, *found.finished]) == plain([Response(0, drawn.segments, "stop", KeptIds.joined(drawn.kept)), done])
