"""PPO runs on two ranks that lose their disk, their rewards or their weights, and what their checkpoints then hold."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy
import torch
import torch.distributed as dist

from benchmarks.reliability.compare import MEASURED
from megappo.checkpoint import store
from megappo.checkpoint.store import SaveFailed
from megappo.config.run_sections import CheckpointConfig, TimeoutsConfig
from megappo.engine.megatron import MegatronEngine
from megappo.rewards.base import RewardError
from megappo.rewards.inline import InlinePart
from megappo.rewards.scorer import Scorer
from megappo.rollout.megatron_engine import MegatronRollout
from megappo.runtime.ending import Ended, StopRequest, Unrecoverable, read_end, record_end
from megappo.runtime.sections import AwakeClock, Sections
from megappo.trainer import checkpoints as module
from megappo.trainer import main, rollout_side, updates
from megappo.trainer.checkpoints import Checkpoints, Contents, RunAround
from megappo.trainer.roles import Critic, Policy
from megappo.trainer.state import TrainerState
from tests.trainer.small_run import run_many, small_config

STEPS = 4
FULL_AT = (2, 3)
"""Steps after which the disk of rank 1 is full."""


def config(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """One update per step (its ratios are those of the weights that sampled), sampled by the policy itself, no validation."""
    quick = {"rollout.engine": "megatron", "data.prompts_per_step": 8, "algorithm.mini_batch_size": 16}
    made = small_config(folder, name, steps=STEPS, **quick, **changes)
    del made["data"]["eval"], made["trainer"]["eval_every"], made["telemetry"]
    return made


def outcome(run: dict[str, Any], *faults: AbstractContextManager[Any], resume: bool = False) -> str:
    """Text of the error that ended the run on this rank, with its notes; empty if there was none."""
    random.seed(0)  # the trainer leaves these two as the process has them
    numpy.random.seed(0)
    with ExitStack() as entered:
        for fault in faults:
            entered.enter_context(fault)
        try:
            run_many(dist.get_rank(), [(run, resume)])
        except (RuntimeError, ValueError) as error:
            return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return ""


# ------------------------------------------------------------------------------------------------------------------- faults


def failing_reward(at: int) -> AbstractContextManager[Any]:
    """The rule raises in its call of this number, on rank 1."""
    submit, calls = Scorer.submit, []

    def submitted(self: Scorer, samples: Any, found: Any = None) -> None:
        calls.append(None)
        if len(calls) == at and dist.get_rank() == 1:
            raise RewardError("the verifier is gone")
        torch.rand(3)  # as a rule may that draws random numbers
        submit(self, samples, found)

    return mock.patch.object(Scorer, "submit", submitted)


def drawing_reward() -> AbstractContextManager[Any]:
    return failing_reward(0)


def nan_reward() -> AbstractContextManager[Any]:
    """The rule exact_match gives NaN on rank 1."""
    submit = Scorer.submit

    def submitted(self: Scorer, samples: Any, found: Any = None) -> None:
        if dist.get_rank() == 1:
            self._parts["exact_match"] = InlinePart("exact_match", lambda sample: float("nan"))
        submit(self, samples, found)

    return mock.patch.object(Scorer, "submit", submitted)


@contextmanager
def nan_once(role: type, result: str) -> Iterator[None]:
    """One NaN in the results of the model's passes of step 2: of a sampled token, the last one of the batch."""
    plain, calls = role._report, []

    def report(self: Any, output: Any, micro: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, output, micro, *args, **kwargs)
        calls.append(None)
        if len(calls) == 2:
            # The value of a token is the model's output at the token before it.
            found.tokens[result][micro.host_offsets[-1] - (2 if result == "raw_value" else 1)] = torch.nan
        return found

    with mock.patch.object(role, "_report", report):
        yield


# Work of a step, in its order, to which a request to stop comes on rank 1; the last one is the save.
PHASES: tuple[tuple[Any, str], ...] = (
    (rollout_side, "generate"),
    (rollout_side, "score_responses"),
    (Critic, "values"),
    (Critic, "_loss_of"),
    (MegatronEngine, "optimizer_step"),
    (MegatronRollout, "push_weights"),
    (store, "encode_rng"),
)


@contextmanager
def asked_in_every_phase(asked: list[str]) -> Iterator[None]:
    """Rank 1 gets a SIGTERM in every phase of step 2. asked: the phases."""
    stop, generated = StopRequest(), []

    def asking(owner: Any, name: str) -> AbstractContextManager[Any]:
        plain = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            generated.append(None) if name == "generate" else None
            if dist.get_rank() == 1 and len(generated) == 2 and name not in asked:
                asked.append(name)
                # In the midst of it: a signal that a thread sends itself is handled before the next line.
                threading.Timer(0.001, os.kill, (os.getpid(), signal.SIGTERM)).start()
            return plain(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    before = signal.signal(signal.SIGTERM, stop._on_term)
    with ExitStack() as entered:
        entered.enter_context(mock.patch.object(main, "StopRequest", lambda: stop))
        for owner, name in PHASES:
            entered.enter_context(asking(owner, name))
        yield
    signal.signal(signal.SIGTERM, before)


def failing_updates(error: Exception) -> AbstractContextManager[Any]:
    """All ranks raise after the critic's updates."""
    plain, calls = updates.run_updates, []

    def failing(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 4:  # the policy's of step 2
            raise error
        return plain(*arguments)

    return mock.patch.object(updates, "run_updates", failing)


@contextmanager
def before_the_end_of_steps(action: Callable[[Checkpoints, int], None]) -> Iterator[None]:
    plain = Checkpoints.end_of_step

    def end_of_step(self: Checkpoints, step: int, **how: Any) -> bool:
        action(self, step)
        return plain(self, step, **how)

    with mock.patch.object(Checkpoints, "end_of_step", end_of_step):
        yield


@contextmanager
def full_disk(seconds: list[float], untouched: list[bool], place: Path) -> Iterator[None]:
    """Files of rank 1 end after 20 kB in the saves after FULL_AT. seconds: of these saves. untouched: step-1 is as it was."""
    limits, plain, before = resource.getrlimit(resource.RLIMIT_FSIZE), Checkpoints._attempt, {}

    def attempt(self: Checkpoints, save: Callable[[], None]) -> None:
        is_full = self._state.step in FULL_AT
        if is_full and dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        started = time.monotonic()
        plain(self, save)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if self._state.step == 1:
            before.update(files(place / "step-1"))
        if is_full:
            seconds.append(time.monotonic() - started)
            untouched.append(files(place / "step-1") == before and sorted(p.name for p in place.iterdir()) == ["LATEST", "step-1"])
        dist.barrier()

    with mock.patch.object(Checkpoints, "_attempt", attempt):
        yield


@contextmanager
def full_disk_of_the_writer(seconds: list[float], untouched: list[bool], place: Path) -> Iterator[None]:
    """As `full_disk` for the process that writes rank 1's part of the save after step 2; the one after step 3 learns of it."""
    limits, plain, before = resource.getrlimit(resource.RLIMIT_FSIZE), Checkpoints._attempt, {}

    def attempt(self: Checkpoints, save: Callable[[], None]) -> None:
        step = self._state.step
        writer = self._store._writer.pid if dist.get_rank() == 1 else None
        if step == 2:
            while (pending := self._store.pending) is not None and not pending.done():  # the save after step 1
                time.sleep(0.01)
            if writer is not None:
                resource.prlimit(writer, resource.RLIMIT_FSIZE, (20_000, limits[1]))
        started = time.monotonic()
        plain(self, save)
        if step == 2:
            before.update(files(place / "step-1"))
        if step == 3:
            seconds.append(time.monotonic() - started)
            untouched.append(files(place / "step-1") == before and sorted(p.name for p in place.iterdir()) == ["LATEST", "step-1"])
            if writer is not None:
                resource.prlimit(writer, resource.RLIMIT_FSIZE, limits)
        dist.barrier()

    with mock.patch.object(Checkpoints, "_attempt", attempt):
        yield


def files(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def poison(kind: str, at: int) -> AbstractContextManager[Any]:
    """One value of the critic's on rank 1, its last pipeline stage, becomes NaN or infinite before the save after step `at`."""

    def spoil(checkpoints: Checkpoints, step: int) -> None:
        if step != at or dist.get_rank() != 1:
            return
        engine: Any = checkpoints._models["critic"]
        if kind == "weight":
            engine.named_parameters()["decoder.layers.1.mlp.linear_fc2.weight"].data[3, 5] = torch.nan
        else:
            next(iter(engine._optimizer._chained()[0].optimizer.state.values()))["exp_avg_sq"].view(-1)[0] = torch.inf

    return before_the_end_of_steps(spoil)


@contextmanager
def unchecked() -> Iterator[None]:
    """Checkpoints as they were written before there was a check."""
    with mock.patch.object(Checkpoints, "_non_finite", lambda self: ""):
        yield


# --------------------------------------------------------------------------------------------------------------------- runs


def run_all(rank: int, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    results["clean"] = outcome(config(folder, "clean", **{"checkpoint.remote": f"file://{folder / 'elsewhere'}"}), drawing_reward())

    rare, often = {"checkpoint.save_every": 0}, {"checkpoint.save_every": 1}
    results["reward"] = outcome(config(folder, "reward", **rare), failing_reward(at=3))
    results["reward again"] = outcome(config(folder, "reward", **rare), nan_reward(), resume=True)
    results["repaired"] = outcome(config(folder, "reward", **rare), drawing_reward(), resume=True)
    results["updates"] = outcome(config(folder, "updates", **often), failing_updates(RewardError("no")))
    results["diverged"] = outcome(config(folder, "diverged", **rare), failing_updates(Unrecoverable("no")))

    one_pass = {**rare, "policy.micro_batch_tokens": 4096, "critic.micro_batch_tokens": 4096}
    results["nan logprob"] = outcome(config(folder, "nan", **one_pass), nan_once(Policy, "logprob"))
    results["nan value"] = outcome(config(folder, "nan", **one_pass), nan_once(Critic, "raw_value"), resume=True)

    results["asked phases"] = []
    results["asked"] = outcome(config(folder, "asked", **rare), asked_in_every_phase(results["asked phases"]), drawing_reward())
    results["asked end"] = read_end(folder / "runs" / "asked")
    results["asked rest"] = outcome(config(folder, "asked", **rare), drawing_reward(), resume=True)

    seconds: list[float] = []
    untouched: list[bool] = []
    full = full_disk(seconds, untouched, folder / "runs" / "full" / "checkpoints")
    waits = {**often, "checkpoint.asynchronous": False}
    results["full"] = outcome(config(folder, "full", **waits), full, drawing_reward())
    results["full seconds"], results["full untouched"] = seconds, untouched
    seconds, untouched = [], []
    full = full_disk_of_the_writer(seconds, untouched, folder / "runs" / "writer" / "checkpoints")
    results["writer"] = outcome(config(folder, "writer", **often), full, drawing_reward())
    results["writer seconds"], results["writer untouched"] = seconds, untouched

    results["weight"] = outcome(config(folder, "weight", **often), poison("weight", at=2))
    results["moment"] = outcome(config(folder, "moment", **often), poison("moment", at=1))

    spoiled = config(folder, "spoiled", **often)
    results["spoiled"] = outcome(spoiled, unchecked(), poison("weight", at=2), failing_reward(at=3))
    with mock.patch.object(module.logger, "warning") as warning:
        results["fallen back"] = outcome(spoiled, drawing_reward(), resume=True)
        results["fallen back warnings"] = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    hopeless = config(folder, "hopeless", **often)
    outcome(hopeless, unchecked(), poison("moment", at=1), failing_reward(at=2))
    record_end(folder / "runs" / "hopeless", Ended("stopped", 1))
    results["hopeless"] = outcome(hopeless, resume=True)
    results["hopeless end"] = read_end(folder / "runs" / "hopeless")
    other_data = mock.patch(
        "megappo.trainer.preflight.require_equal_data", side_effect=ValueError("data.train: rank 1 reads another")
    )
    results["other data"] = outcome(config(folder, "other"), other_data)
    results.update({name: case(folder) for name, case in CASES.items()})
    return results


# -------------------------------------------------------------------------------------------- the policy alone, without models


class Disk:
    """A store that fails as often as asked. step: the present one. events: what was done."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.events, self.step = failures, [], 0
        self.pending: Any = None

    def save(self, step: int, *rest: Any) -> None:
        self.events.append(f"save {step}")
        if self.failures:
            self.failures -= 1
            raise SaveFailed(f"checkpoint of step {step} was not saved: No space left on device")

    def begin_save(self, step: int, *rest: Any) -> None:
        """Rank 1 needs two more boundaries to write its part, the other ranks none."""
        self.events.append(f"begin {step}")
        answers = [True, False, False] if dist.get_rank() == 1 else [True] * 9
        self.pending = SimpleNamespace(step=step, done=lambda: answers.pop() if answers else True)

    def drain(self) -> None:
        pending, self.pending = self.pending, None
        self.events.append(f"commit {pending.step} at {self.step}")
        if self.failures:
            self.failures -= 1
            raise SaveFailed("No space left on device")


def policy(disk: Disk, *, background: bool = False, **keys: Any) -> tuple[Checkpoints, StopRequest]:
    stop = StopRequest()
    log: Any = SimpleNamespace(note=lambda text: disk.events.append(text), resume_after=lambda step: None)
    run = RunAround(
        stop, log, Sections(TimeoutsConfig(), AwakeClock(1.0)), lambda: disk.step * 10 // 25
    )  # 10 of 25 prompts in a step
    made = Checkpoints(
        cast(Any, disk), CheckpointConfig(asynchronous=background, **keys), {}, Contents({}, TrainerState(), {}, {}), run
    )
    return made, stop


def go(disk: Disk, checkpoints: Checkpoints, steps: int, stop: StopRequest | None = None) -> str:
    """Run steps until the last, or until rank 1 is asked to stop in the third; returns the error's text."""
    try:
        for step in range(1, steps + 1):
            disk.step = step
            with checkpoints.guard_step():
                if step == 3 and stop is not None and dist.get_rank() == 1:
                    stop.received = signal.SIGTERM
                checkpoints._state.step += 1
                if checkpoints.end_of_step(step, is_last=step == steps):
                    disk.events.append(f"stopped {step}")
                    break
    except SaveFailed as error:
        return str(error)
    return ""


def three_failures_in_a_row(folder: Path) -> Any:
    disk = Disk(failures=9)
    checkpoints, _ = policy(disk, save_every=2)
    return go(disk, checkpoints, 9), disk.events, checkpoints.metrics()["checkpoint/failed_saves"]


def two_failures(folder: Path) -> Any:
    disk = Disk(failures=2)
    checkpoints, _ = policy(disk, save_every=2)
    return go(disk, checkpoints, 6), disk.events, checkpoints.metrics()["checkpoint/failed_saves"]


def last_fails_once(folder: Path) -> Any:
    disk = Disk(failures=1)
    return go(disk, policy(disk, save_every=0)[0], 2), disk.events


def last_fails_twice(folder: Path) -> Any:
    disk = Disk(failures=2)
    return go(disk, policy(disk, save_every=0)[0], 2), disk.events


def epochs(folder: Path) -> Any:
    disk = Disk()
    return go(disk, policy(disk, save_every="epoch")[0], 7), disk.events


def no_checkpoints(folder: Path) -> Any:
    disk, stopped = Disk(), Disk()
    checkpoints, stop = policy(stopped, save_every="never")
    return go(disk, policy(disk, save_every="never")[0], 6), disk.events, go(stopped, checkpoints, 6, stop), stopped.events


def stop_on_one_rank(folder: Path) -> Any:
    disk = Disk()
    checkpoints, stop = policy(disk, save_every=0)
    return go(disk, checkpoints, 6, stop), disk.events


def in_the_background(folder: Path) -> Any:
    disk = Disk()
    return go(disk, policy(disk, background=True, save_every=4)[0], 9), disk.events


def drained_before_the_next(folder: Path) -> Any:
    disk = Disk()
    return go(disk, policy(disk, background=True, save_every=1)[0], 3), disk.events


def background_fails(folder: Path) -> Any:
    disk = Disk(failures=1)
    checkpoints, _ = policy(disk, background=True, save_every=4)
    return go(disk, checkpoints, 9), disk.events, checkpoints.failed_saves


def failed_step(disk: Disk, checkpoints: Checkpoints, error: Exception) -> Any:
    """Notes of the error that ends a step, and what was done."""
    try:
        with checkpoints.guard_step():
            raise error
    except type(error):
        return error.__notes__, disk.events
    raise AssertionError


def error_in_the_background(error: Exception, failures: int = 0) -> Any:
    """A step fails while a save is being written."""
    disk = Disk()
    checkpoints, _ = policy(disk, background=True, save_every=2)
    go(disk, checkpoints, 3)
    del disk.events[:]
    disk.failures = failures
    disk.begin_save(3)
    return failed_step(disk, checkpoints, error)


def emergency_of_weights_only(folder: Path) -> Any:
    disk = Disk()
    checkpoints, _ = policy(disk, save_every=0, save_only_model=True)
    checkpoints._state.step = 2
    return failed_step(disk, checkpoints, RewardError("no"))


def emergency_in_the_background(folder: Path) -> Any:
    return error_in_the_background(RewardError("no"))


def emergency_after_a_failure_in_the_background(folder: Path) -> Any:
    disk = Disk(failures=1)
    checkpoints, _ = policy(disk, background=True, save_every=0)
    checkpoints._state.step = 3
    disk.begin_save(2)
    return failed_step(disk, checkpoints, RewardError("no"))


def divergence_in_the_background(folder: Path) -> Any:
    return error_in_the_background(Unrecoverable("no")), error_in_the_background(Unrecoverable("no"), failures=1)


CASES = {
    case.__name__: case
    for case in (
        three_failures_in_a_row,
        two_failures,
        last_fails_once,
        last_fails_twice,
        epochs,
        no_checkpoints,
        stop_on_one_rank,
        in_the_background,
        drained_before_the_next,
        background_fails,
        emergency_in_the_background,
        divergence_in_the_background,
        emergency_of_weights_only,
        emergency_after_a_failure_in_the_background,
    )
}


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """Lines of the metrics without wall times."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    volatile = (*MEASURED, "checkpoint/")
    return [{key: value for key, value in json.loads(line).items() if not key.startswith(volatile)} for line in lines]
