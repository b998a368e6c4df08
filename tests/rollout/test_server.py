"""The rollout half of an asynchronous run, real vLLM with two replicas and then with one of tp 2; rank 0 stands for the training
half: it admits steps, pushes weights of given versions and takes the responses.

Oracles: `generate` of the synchronous run for staleness 0, the run itself for its replay and its resume. All runs of the module are
in one world.
"""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megappo.bridge.sync import WeightSync
from megappo.rollout.channel import Channel
from megappo.rollout.event_log import BATCH, EventLog, read_script
from megappo.rollout.generation import generate
from megappo.rollout.hand_over import take_responses, take_snapshots
from megappo.rollout.server import _FIRST_EVALUATION, RequestSource, _Server, serve
from megappo.rollout.snapshot import Snapshot
from megappo.rollout.types import KeptIds, Replica, Request, Response, SamplingParams
from megappo.rollout.vllm_engine import VllmEngine
from megappo.rollout.vllm_outputs import Drawn
from tests.models.checkpoints import write_checkpoint
from tests.rollout.held_versions import END, Held, distances, parts_of
from tests.rollout.responses import kept_of, plain, segment
from tests.worlds import spawn_world

STEPS, ROWS, SAMPLES, STALENESS, SAVED = 5, 4, 2, 2, 2
SAMPLING = SamplingParams(max_tokens=40, temperature=0.9)
TOLERANCE = 1e-5  # as in `test_push_while_running.py`
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
HEADER = {"facts": "of this run"}


def prompt(row: int) -> tuple[int, ...]:
    return tuple(random.Random(row).randrange(3, 131) for _ in range(5 + row % 17))


def rows_of(step: int) -> list[int]:
    return [step * ROWS + place for place in range(ROWS)]


def of_step(step: int, rows: Sequence[int]) -> list[Request]:
    """Requests of a step: most of them short, some long."""
    lengths = random.Random(step)
    return [
        Request(i, prompt(rows[i // SAMPLES]), 1000 * step + i, i // SAMPLES, max_tokens=min(40, int(2 + lengths.expovariate(0.1))))
        for i in range(len(rows) * SAMPLES)
    ]


def of_evaluation(name: str) -> tuple[list[Request], SamplingParams]:
    return [Request(i, prompt(100 + i), i, i) for i in range(6)], GREEDY


SOURCE = RequestSource(of_step, of_evaluation, SAMPLING, lambda step, rows: (of_step(step, rows), SAMPLING))


# ------------------------------------------------------------------------------------------------------------- in the world


class Pauses:
    """Random waits of up to `most_s` on this rank."""

    def __init__(self, most_s: float, seed: int) -> None:
        self._most_s, self._random = most_s, random.Random(seed)

    def __call__(self) -> None:
        time.sleep(self._random.random() * self._most_s)


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
        store: Any = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self.leaders = list(range(1, 3, tp))
        self.held, self.channel = held, Channel(store, dist.get_rank(), self.leaders, 60.0)
        self.name, self.staleness, self.script, self.restored, self.steps = name, staleness, script, restored, steps
        self.pause = Pauses(pause_s, sum(name.encode()) + dist.get_rank())

    def train(self, sync: WeightSync, folder: Path) -> dict[str, Any]:
        """The training half, on rank 0."""
        self.found: dict[str, Any] = {"steps": {}, "figures": []}
        done = SAVED if self.restored else 0
        admitted = done + self.staleness if self.restored else 0
        if self.restored:
            steps = {step: rows_of(step) for step in range(done + 1, admitted + 1)}
            self.channel.tell("restore", path=str(folder / self.restored), steps=steps)
        self.push(sync, done)
        for step in range(done + 1, self.steps + 1):
            while admitted < min(step + self.staleness, STEPS):
                admitted += 1
                self.channel.tell("requests", step=admitted, rows=rows_of(admitted))
            self.found["steps"][step] = self.take(f"step/{step}")
            self.pause()
            self.push(sync, step)
            if step == 3:
                self.channel.tell("evaluation", key=f"evaluation/{step}/held out", set="held out")
                self.found["evaluation"] = self.take(f"evaluation/{step}/held out")
            if step == SAVED:
                self.channel.tell("snapshot")
                self.found["snapshots"] = take_snapshots(self.leaders)
                (folder / self.name).mkdir()
                for replica, data in self.found["snapshots"].items():
                    (folder / self.name / f"rollout-{replica}.bin").write_bytes(data)
        self.channel.tell("stop", finished=self.steps == STEPS)
        return self.found

    def push(self, sync: WeightSync, version: int) -> None:
        self.channel.tell("push", version=version, recompute=version == SAVED)
        self.held.send(sync, version)

    def take(self, key: str) -> dict[int, list]:
        self.channel.wait_for(key, key)
        self.channel.tell("hand_over", key=key)
        responses, figures = take_responses()
        self.channel.met()
        self.found["figures"] += figures
        return segments(responses)

    def serve(self, engine: VllmEngine, folder: Path) -> str | None:
        """The rollout half; return the log of this rank's replica, None where it has none."""

        def log_of(name: str) -> Path:
            return folder / f"{name}-{engine.replica.index}.log"

        def read(path: str) -> list[bytes]:
            return [file.read_bytes() for file in Path(path).glob("rollout-*.bin")]

        with engine.in_world():
            path = log_of(self.name) if engine.replica.is_leader else None
        script = read_script(log_of(self.script), HEADER) if self.script else ()
        if self.restored and path is not None and log_of(self.restored).exists():
            shutil.copy(log_of(self.restored), path)  # with what the killed run wrote after the checkpoint
        with mock.patch.object(engine, "_cache_after_push", "keep" if "kept" in self.name else "recompute"):
            finished = serve(engine, self.channel, SOURCE, 1, EventLog(path, HEADER, script), read, self.pause)
        assert finished == (self.steps == STEPS)
        return None if path is None else path.read_text("utf-8")


def segments(responses: Sequence[Response]) -> dict[int, list]:
    return {one.number: parts_of(one) for one in responses}


def synchronous(held: Held, engine: VllmEngine) -> dict[str, Any]:
    """The oracle of staleness 0: `generate` between two pushes, on the ranks of the engine."""
    steps: dict[int, dict] = {}
    for step in range(1, STEPS + 1):
        held.push(engine, step - 1)
        with engine.in_world():
            steps[step] = segments(generate(engine, of_step(step, rows_of(step)), SAMPLING))
            if step == 4:
                evaluation = segments(generate(engine, *of_evaluation("held out")))
    held.ask(END)
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
        ("stopped", 1, STALENESS, 0.0, "", "", 2),
    ),
    2: (("in step, tp 2", 2, 0, 0.02), ("dealt anew", 2, STALENESS, 0.0, "", "ahead")),
}


def in_world(rank: int, path: str, folder: Path) -> dict[str, Any]:
    held, found = Held(path), {}
    for tp, settings in RUNS.items():
        runs = [Run(held, *one) for one in settings]
        if rank == 0:
            sync = held.connect(tp)
            held.serve(sync)
            for run in runs:
                found[run.name] = run.train(sync, folder)
            continue
        with held.engine(tp, max_num_seqs=4) as engine:
            found[f"synchronous, tp {tp}"] = synchronous(held, engine)
            for run in runs:
                found[run.name] = run.serve(engine, folder)
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
    for tp, name in ((1, "in step"), (2, "in step, tp 2")):
        ranks = [rank[f"synchronous, tp {tp}"] for rank in world[1:]]
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


def test_two_replicas_requests_go_on_in_one_exactly_once(world):
    found, parts = world[0]["dealt anew"]["steps"], [Snapshot.decoded(one) for one in world[0]["ahead"]["snapshots"].values()]
    assert {step: sorted(batch) for step, batch in found.items()} == {s: list(range(ROWS * SAMPLES)) for s in (3, 4, 5)}
    begun = {number: drawn.segments for part in parts for number, drawn in part.running.items()}
    begun |= {one.number: one.segments for part in parts for one in part.finished}
    for number, drawn in begun.items():
        batch, place = divmod(number, BATCH)
        assert found[batch][place][: len(drawn)] == parts_of(Response(number, drawn, "stop")), "nothing is drawn again"
    assert '"resumed": true' in logs(world, "dealt anew")[0], "its requests were dealt otherwise: no replay from the start"


def test_every_token_is_of_a_version_that_its_step_may_have(world, checkpoint):
    ages = []
    for step, batch in world[0]["ahead"]["steps"].items():
        prompts = {one.number: one.prompt for one in of_step(step, rows_of(step))}
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
    server = _Server(engine, channel, SOURCE, 1, EventLog(None, HEADER), lambda path: [])
    server._admit(1, rows_of(1))
    server._begin_first(_FIRST_EVALUATION, "evaluation/0/held out", *of_evaluation("held out"))
    server._begin()
    first = _FIRST_EVALUATION * BATCH
    assert submitted == [first, first + 2, first + 4, BATCH], "before what waits, each on its replica"


def test_a_log_of_another_run_or_without_its_end_is_refused(world, tmp_path):
    text, path = logs(world, "ahead")[0], tmp_path / "replica-0.log"
    lines = text.splitlines(keepends=True)
    for written, words in (
        (text.replace("of this run", "of another"), "is of a run with facts = of another, not of this run"),
        ("".join(lines[:-1]), "is cut: it has no end"),
        (text[:-2], "is cut: it has no end"),
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
    assert events[1] == ("a", 0, 1 * BATCH, 4) and events[-1].kind == "e" and len(events) == len(lines) - 1


def test_a_snapshot_is_a_file_without_pickles_and_comes_back_whole():
    drawn = Drawn((segment([5, 6], [-0.5, -1.5], 3), segment([7], [-0.25], 4)), (kept_of([[5, 9], [6]]), kept_of([[7, 8, 9]])))
    done = Response(2 * BATCH + 1, drawn.segments[1:], "length", kept_of([[7, 8, 9]]))
    data = Snapshot(1, 2, 300, 40, {3 * BATCH: drawn, 3 * BATCH + 1: Drawn()}, [done]).encoded()
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        assert all(name.endswith(".npy") and file.read(name)[:6] == b"\x93NUMPY" for name in file.namelist())
    found = Snapshot.decoded(data)
    assert (found.replica, found.num_evaluations, found.engine_step, found.num_events) == (1, 2, 300, 40)
    assert list(found.running) == [3 * BATCH, 3 * BATCH + 1] and found.running[3 * BATCH + 1] == Drawn()
    again = Response(0, found.running[3 * BATCH].segments, "stop", KeptIds.joined(found.running[3 * BATCH].kept))
    assert plain([again, *found.finished]) == plain([Response(0, drawn.segments, "stop", KeptIds.joined(drawn.kept)), done])
