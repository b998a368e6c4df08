"""Asynchronous runs whose ranks the launcher of this machine starts, and of which some are killed: two ranks train, six are three
replicas of two, with adapters that are pushed apart."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml

from megappo.commands.launch.local import Requests, WorldEnd, run_world
from megappo.rollout.half import RolloutHalf
from megappo.rollout.meetings import Guests
from megappo.rollout.vllm_engine import VllmEngine
from megappo.runtime.failure import joining_as, record_exceptions
from tests.trainer.asynchronous_runs import config_of, run
from tests.worlds import IMPORTED_ONCE, _begin_rank

WORLD = 8
MID_STEP, MID_PUSH, STALE = "mid-step", "mid-push", "stale"
APART = {"rollout.tp": 2, "policy.lora": {"rank": 4, "alpha": 8.0}, "rollout.adapter": "separate"}


class Forks:
    """Starts ranks from the server of `tests.worlds`, for the launcher (`processes.Starter`)."""

    descriptors: Sequence[int] = ()

    def start(self, environment: Mapping[str, str], arguments: Sequence[str]) -> Any:
        context: Any = mp.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        process = context.Process(target=_rank, args=({**os.environ, **environment}, list(arguments)))
        process.start()
        return _Rank(process)


class _Rank:
    def __init__(self, process: Any) -> None:
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self._process.exitcode


def _rank(environment: dict[str, str], arguments: Sequence[str]) -> None:
    _begin_rank(environment)
    torch.set_num_threads(1)
    rank, (config, replay, *faults) = int(environment["RANK"]), arguments
    record_exceptions(rank)
    for fault in faults:
        victim, version, kind = fault.split(",")
        if int(victim) == rank:
            {MID_STEP: _die_in_step, MID_PUSH: _die_in_push, STALE: _keep_adapter}[kind](int(version))
    settings = yaml.safe_load(Path(config).read_text())
    if joining_as(rank):
        _wait_for_steps(Path(settings["run"]["output_dir"], settings["run"]["name"], "metrics.jsonl"))
    if rank == 0:
        _wait_for_replicas()
    run(rank, settings, replay=Path(replay) if replay else None)


BACK = 5  # version with which a lost replica takes part again, behind all losses


def _wait_for_steps(log: Path) -> None:
    """Be ready to take part again only behind the steps before."""
    plain = Guests.wait_to_join

    def wait_to_join(self: Guests, meanwhile: Callable[[], None]) -> bool:
        while log.read_text().count("\n") < BACK - 1:
            time.sleep(0.05)
        return plain(self, meanwhile)

    Guests.wait_to_join = wait_to_join


def _wait_for_replicas() -> None:
    """Push only when a replica that starts again is ready: it takes seconds, and a step less than one."""
    plain = RolloutHalf.push_weights

    def push_weights(self: RolloutHalf, version: int) -> dict[str, float]:
        until = time.monotonic() + 120
        while version == BACK and len(self._channel.live) == 1 and time.monotonic() < until:
            if any(map(self._channel.is_ready, range(3))):
                break
            time.sleep(0.05)
        return plain(self, version)

    RolloutHalf.push_weights = push_weights


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_step(version: int) -> None:
    """With requests half drawn, two steps of the engine after a push."""
    plain, steps = VllmEngine.poll, []

    def poll(self: VllmEngine) -> Any:
        if self._version == version and self.num_unfinished > 1:
            steps.append(0)
            if len(steps) > 2:
                _die()
        return plain(self)

    VllmEngine.poll = poll


def _die_in_push(fatal: int) -> None:
    """When the others wait for it in the exchange."""
    plain = VllmEngine._transferred

    def transferred(self: VllmEngine, version: int) -> dict[str, float]:
        if version == fatal:
            _die()
        return plain(self, version)

    VllmEngine._transferred = transferred


def _keep_adapter(missed: int) -> None:
    """Go on with the adapters of the push before this one."""
    plain = VllmEngine._transferred

    def transferred(self: VllmEngine, version: int) -> dict[str, float]:
        with mock.patch.object(self, "take_adapter", lambda tensors: None) if version == missed else nullcontext():
            return plain(self, version)

    VllmEngine._transferred = transferred


def run_here(folder: Path, name: str, *faults: str, replay: str = "", rejoins: int = 0, **changes: Any) -> WorldEnd:
    """faults: RANK,VERSION,KIND."""
    config = config_of(folder, name, 2, **{"run.num_ranks": WORLD, "rollout.ranks": f"2-{WORLD - 1}", **APART, **changes})
    del config["reference"]  # the policy without its adapters
    path, evidence = folder / f"{name}.yaml", folder / f"{name}.evidence"
    path.write_text(yaml.safe_dump(config))
    evidence.mkdir()
    with Requests(stoppable=False) as requests:
        return run_world(Forks(), WORLD, [str(path), replay, *faults], requests, evidence, rejoins=rejoins)
