"""The rollout half of an asynchronous run, real vLLM with two replicas and then with one of tp 2; rank 0 stands for the training
half: it admits steps, pushes weights of given versions and takes the responses.

Oracles: `generate` of the synchronous run for staleness 0, the run itself for its replay and its resume. All runs of the module are
in one world.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch.distributed as dist

from megappo.bridge.sync import WeightSync
from megappo.rollout.channel import Channel
from megappo.rollout.event_log import EventLog, read_script
from megappo.rollout.generation import generate
from megappo.rollout.hand_over import exchanged, take_responses, take_snapshots
from megappo.rollout.server import RequestSource, serve
from megappo.rollout.snapshot import Snapshot
from megappo.rollout.types import KeptIds, Request, Response, SamplingParams, Segment
from megappo.rollout.vllm_engine import VllmEngine
from megappo.rollout.vllm_outputs import Drawn
from tests.models.checkpoints import write_checkpoint
from tests.rollout.held_versions import END, Held, distances, parts_of
from tests.worlds import spawn_world

STEPS, ROWS, SAMPLES, STALENESS, SAVED = 5, 4, 2, 2, 2
SAMPLING = SamplingParams(max_tokens=40, temperature=0.9)
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


SOURCE = RequestSource(of_step, of_evaluation, SAMPLING)


# ------------------------------------------------------------------------------------------------------------- in the world


class Pauses:
    """Random waits of up to `most_s` on this rank."""

    def __init__(self, most_s: float, seed: int) -> None:
        self._most_s, self._random = most_s, random.Random(seed)

    def __call__(self) -> None:
        time.sleep(self._random.random() * self._most_s)


class Run:
    """One run, as every rank sees it. tp: of its engine. staleness: steps ahead. pauses: of this rank. log: file without the
    replica's number; None for no log. script: log to replay. restored: snapshots, of a run that goes on behind step SAVED."""

    def __init__(
        self,
        held: Held,
        name: str,
        tp: int,
        staleness: int,
        pauses: float = 0.0,
        *,
        folder: Path,
        script: str = "",
        restored: bool = False,
    ) -> None:
        leaders = list(range(1, 3, tp))
        self.held, self.name, self.tp, self.staleness, self.folder = held, name, tp, staleness, folder
        store: Any = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self.channel, self.leaders = Channel(store, dist.get_rank(), leaders, 60.0), leaders
        self.pause, self.script, self.restored = Pauses(pauses, hash(name) % 1000 + dist.get_rank()), script, restored

    def train(self, sync: WeightSync, evaluate_at: int = -1, save_at: int = -1) -> dict[str, Any]:
        """The training half, on rank 0: responses by step, figures, what was saved."""
        found: dict[str, Any] = {"steps": {}, "figures": [], "evaluation": None, "snapshots": None}
        done = SAVED if self.restored else 0
        admitted = done + self.staleness if self.restored else 0
        if self.restored:
            steps = {step: rows_of(step) for step in range(done + 1, admitted + 1)}
            self.channel.tell("restore", path=str(self.folder), steps=steps)
        self.push(sync, done)
        for step in range(done + 1, STEPS + 1):
            while admitted < min(step + self.staleness, STEPS):
                admitted += 1
                self.channel.tell("requests", step=admitted, rows=rows_of(admitted))
            responses, figures = self.take(f"step/{step}")
            found["steps"][step] = {one.number: parts_of(one) for one in responses}
            found["figures"] += figures
            self.pause()
            self.push(sync, step)
            if step == evaluate_at:
                self.channel.tell("evaluation", key=f"evaluation/{step}/held out", set="held out")
                found["evaluation"] = {one.number: parts_of(one) for one in self.take(f"evaluation/{step}/held out")[0]}
            if step == save_at:
                self.channel.tell("snapshot")
                found["snapshots"] = take_snapshots(self.leaders)
        self.channel.tell("stop", finished=True)
        return found

    def push(self, sync: WeightSync, version: int) -> None:
        self.channel.tell("push", version=version)
        self.held.send(sync, version)

    def take(self, key: str) -> tuple[list[Response], list]:
        self.channel.wait_for(key, key)
        self.channel.tell("hand_over", key=key)
        return take_responses()

    def log(self, engine: VllmEngine) -> Path:
        return self.folder / f"{self.name}-{engine.replica.index}.log"

    def serve(self, engine: VllmEngine) -> bool:
        """The rollout half."""
        script = read_script(self.folder / f"{self.script}-{engine.replica.index}.log", HEADER) if self.script else ()
        with engine.in_world():
            path = self.log(engine) if engine.replica.is_leader else None
        events = EventLog(path, HEADER, script)
        return serve(engine, self.channel, SOURCE, 1, events, self.read, self.pause)

    def read(self, folder: str) -> list[bytes]:
        return [path.read_bytes() for path in sorted(Path(folder).glob("rollout-*.bin"))]


def synchronous(held: Held, engine: VllmEngine) -> dict[int, dict]:
    """The oracle of staleness 0: `generate` between two pushes, on the ranks of the engine."""
    found = {}
    for step in range(1, STEPS + 1):
        held.push(engine, step - 1)
        with engine.in_world():
            found[step] = {one.number: parts_of(one) for one in generate(engine, of_step(step, rows_of(step)), SAMPLING)}
    held.ask(END)
    return found


def in_world(rank: int, path: str, folder: Path) -> dict[str, Any]:
    held, found = Held(path), {}
    held.folder = folder
    two = [
        Run(held, "in step", 1, 0, 0.02, folder=folder),
        Run(held, "ahead", 1, STALENESS, 0.02, folder=folder),
        Run(held, "other pauses", 1, STALENESS, 0.05, folder=folder),
        Run(held, "replayed", 1, STALENESS, 0.04, folder=folder, script="ahead"),
        Run(held, "resumed", 1, STALENESS, 0.03, folder=folder, script="ahead", restored=True),
    ]
    one = [
        Run(held, "in step, tp 2", 2, 0, 0.02, folder=folder),
        Run(held, "dealt anew", 2, STALENESS, folder=folder, restored=True),
    ]
    for tp, runs in ((1, two), (2, one)):
        if rank == 0:
            sync = held.connect(tp)
            held.serve(sync)
            for run in runs:
                print(run.name, flush=True)
                found[run.name] = run.train(sync, evaluate_at=3, save_at=SAVED if run.name == "ahead" else -1)
                for replica, data in (found[run.name]["snapshots"] or {}).items():
                    (folder / f"rollout-{replica}.bin").write_bytes(data)
                    shutil.copy(folder / f"ahead-{replica}.log", folder / f"resumed-{replica}.log")
            continue
        with held.engine(tp, max_num_seqs=4) as engine:
            found[f"synchronous, tp {tp}"] = synchronous(held, engine)
            for run in runs:
                assert run.serve(engine)
                found[run.name] = None if not run.log(engine).exists() else run.log(engine).read_text()
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


def test_it(world, checkpoint):
    train = world[0]
    for name, found in train.items():
        print(
            name,
            found["figures"][-2:],
            {s: [[(len(t), v) for t, _, v in p] for p in r.values()] for s, r in found["steps"].items()},
        )
    print(world[1]["ahead"])
    for tp, name in ((1, "in step"), (2, "in step, tp 2")):
        sync = {s: world[1][f"synchronous, tp {tp}"][s] | world[2][f"synchronous, tp {tp}"][s] for s in range(1, STEPS + 1)}
        got = train[name]["steps"]
        print(
            name,
            got == sync,
            {s: {n: [a[0] for a in p] for n, p in r.items()} for s, r in got.items()}
            == {s: {n: [a[0] for a in p] for n, p in r.items()} for s, r in sync.items()},
        )
    for name in ("replayed", "other pauses"):
        print(
            name,
            train[name]["steps"] == train["ahead"]["steps"],
            world[1][name] == world[1]["ahead"],
            world[2][name] == world[2]["ahead"],
        )
    print(
        "resumed",
        {s: train["resumed"]["steps"][s] == train["ahead"]["steps"][s] for s in train["resumed"]["steps"]},
        world[1]["resumed"] == world[1]["ahead"],
    )
    print(world[1]["resumed"])
