"""Asynchronous runs of the small task in one world of three ranks, two of which train, and the synchronous run of the same two."""

from __future__ import annotations

import os
import random
import signal
import string
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch.distributed as dist
import yaml

from megappo.bridge.sync import WeightSync
from megappo.commands.plan.run import plan_run
from megappo.config.loading import load_config
from megappo.data.ahead import AheadLoader
from megappo.data.loader import PromptLoader
from megappo.rewards.compose import RewardError
from megappo.rollout.channel import Channel
from megappo.rollout.server import _Server
from megappo.rollout.subworld import SubWorld
from megappo.rollout.types import Request, SamplingParams
from megappo.rollout.vllm_engine import VllmEngine
from megappo.runtime.ending import StopRequest
from megappo.trainer import main, rollout_side
from megappo.trainer.training_side import TrainingSide
from tests.models.vision_cases import write_questions, write_vision_checkpoint
from tests.trainer.small_run import set_keys, small_config, write_small_task

TRAINING, WORLD = 2, 3


def config_of(folder: Path, name: str, staleness: int | None, **changes: Any) -> dict[str, Any]:
    usual = {
        "rollout.max_response_tokens": 24,
        "rollout.kv_cache_gib": 0.02,
        "rollout.max_num_seqs": 28,  # more than a step's and less than those of two
        "data.prompts_per_step": 8,
        "data.eval_prompts": 6,
        "algorithm.mini_batch_size": 8,
        "trainer.eval_every": 2,
        "trainer.eval_before": False,
        "checkpoint.save_every": 2,
        "checkpoint.keep_last": 10,
        "checkpoint.asynchronous": False,
        "checkpoint.export_at_end": False,
        "telemetry.trajectories_every": 1,
        "telemetry.trajectories_per_step": 16,
    }
    apart = {
        "run.num_ranks": WORLD,
        "rollout.ranks": "2",
        "rollout.max_staleness": staleness,
        "algorithm.importance_sampling.type": "tis",
        **{f"{role}.ranks": "0-1" for role in ("policy", "critic", "reference")},
    }
    correction = {"algorithm.importance_sampling.type": "tis"}
    return set_keys(small_config(folder, name, steps=6), {**usual, **(correction if staleness is None else apart), **changes})


REWARD = """
import re, zlib
from megappo.rewards.base import NoVerdict
def score(sample, first):
    row, number = map(int, re.search(r"#(\\d+) .sample (\\d+)", sample.sample_id).groups())
    if row not in first: return zlib.crc32(sample.response.encode()) % 100 < 15
    if number % 4 == 0: raise NoVerdict("judge")
    return number % 2
"""


def write_task(folder: Path) -> None:
    """Write what the runs read, before their world begins: a rank would read a file that another one writes again as empty."""
    write_small_task(folder)
    (folder / "mine.py").write_text(REWARD)
    (folder / "play.py").write_text(ENVIRONMENT)
    write_vision_checkpoint(folder / "qwen3_vl", "qwen3_vl")
    write_questions(folder)


def by_scores(folder: Path, name: str, staleness: int | None, steps: int) -> dict[str, Any]:
    """A run that draws other prompts for what scores alike, all of them again in its first step, and passes over others."""
    first = list(map(int, PromptLoader(60, 8, shuffle=True, seed=1).next_step()))
    part = {"path": str(folder / "mine.py"), "function": "score", "args": {"first": first}}
    changes = {
        "rollout.samples_per_prompt": 4,
        "rollout.max_num_seqs": 48,
        "data.curriculum": {},
        "algorithm.dynamic_sampling": {"max_rounds": 3},
        "reward": {"parts": [part], "max_without_verdict": 0.2, "above_max": "redraw"},
        "trainer.steps": steps,
    }
    return config_of(folder, name, staleness, **changes)


ENVIRONMENT = '''
import zlib

from megappo.rewards.base import NoVerdict

def play(turn, fails=False):
    """An answer that depends on all turns; a few trajectories end early, and a few have no verdict."""
    digest = turn.state["digest"] = zlib.crc32(turn.response.encode(), turn.state.get("digest", turn.seed % 2**32))
    if fails:
        raise ValueError("no tool")
    if digest % 11 == 0:
        raise NoVerdict("tool_down")
    return None if digest % 5 == 0 else "+-"[digest % 2]

def judge(sample):
    """A number that all digits of a float are needed for."""
    digest = zlib.crc32(sample.response.encode())
    if digest % 13 == 0:
        raise NoVerdict("unsure")
    return {"score": digest / 2**32, "parts": {"turns": float(len(sample.turns))}}
'''


def in_environment(folder: Path, name: str, staleness: int | None, steps: int, **settings: Any) -> dict[str, Any]:
    environment = {"path": str(folder / "play.py"), "function": "play", "max_turns": 3, "turn_tokens": 10, **settings}
    judge = {"name": "judge", "path": str(folder / "play.py"), "function": "judge", "workers": 1}
    rewards = {"parts": [judge, {"name": "has_eos"}], "max_without_verdict": 0.6}
    changes = {"rollout.environment": environment, "reward": rewards, "trainer.steps": steps}
    return config_of(folder, name, staleness, **changes)


def seeing(folder: Path, name: str, staleness: int, steps: int) -> dict[str, Any]:
    """A run of several turns, which letters end, after prompts with images, whose towers train."""
    config = in_environment(folder, name, staleness, steps)
    for section, key in (
        ("data", "tokenizer"),
        ("data", "eval"),
        ("data", "eval_prompts"),
        *(("checkpoint", one) for one in _SAVED),
    ):
        config[section].pop(key, None)
    changes = {"policy.model": str(folder / "qwen3_vl"), "data.train": str(folder / "questions.jsonl"), "data.image_key": "images"}
    sizes = {"data.max_prompt_tokens": 64, "data.prompts_per_step": 4, "telemetry.trajectories_per_step": 8}
    lengths = {"trainer": {"steps": steps}, "checkpoint.save_every": 0, "rollout.stop": list(string.ascii_letters)}
    return set_keys(config, {**changes, **sizes, **lengths})


_SAVED = ("keep_last", "asynchronous")  # keys of checkpoints, of which it makes none


@contextmanager
def pauses(rank: int, seed: int, rollout_s: float, training_s: float) -> Iterator[None]:
    """Make engine steps and the training of steps last longer, by times drawn with the seed."""
    chance, poll, logprobs = random.Random(f"{seed} {rank}"), VllmEngine.poll, TrainingSide.add_logprobs

    def slow_poll(self: VllmEngine) -> Any:
        time.sleep(chance.random() * rollout_s)
        return poll(self)

    def slow_logprobs(self: TrainingSide, record: Any) -> None:
        time.sleep(chance.random() * training_s)
        logprobs(self, record)

    with mock.patch.object(VllmEngine, "poll", slow_poll), mock.patch.object(TrainingSide, "add_logprobs", slow_logprobs):
        yield


@contextmanager
def only_when_waited_for() -> Iterator[None]:
    """Make engine steps only while training waits for responses: the next push finds the others half drawn, on any machine."""
    store: Any = dist.PrefixStore("test.waited", dist.distributed_c10d._get_default_store())
    wait_for, must_wait = Channel.wait_for, _Server._must_wait

    def waiting(self: Channel, *arguments: str) -> None:
        if dist.get_rank() == 0:
            store.set("waits", "1")
        wait_for(self, *arguments)
        if dist.get_rank() == 0:
            store.set("waits", "0")

    def must(self: _Server) -> bool:
        return must_wait(self) or not store.check(["waits"]) or store.get("waits") == b"0"

    with mock.patch.object(Channel, "wait_for", waiting), mock.patch.object(_Server, "_must_wait", must):
        yield


def run(
    rank: int, config: dict[str, Any], *, resume: bool = False, replay: Path | None = None, stop: StopRequest | None = None
) -> bool:
    """Run this rank's part; True at the run's end."""
    random.seed()  # as in a process of its own
    numpy.random.seed()
    path = Path(config["run"]["output_dir"]).parent / f"{config['run']['name']}.{rank}.yaml"
    path.write_text(yaml.safe_dump(config))
    loaded = load_config(str(path), [])
    planned = plan_run(loaded, config["run"]["num_ranks"], "cpu", resume=resume)
    assert planned.data is not None
    return main.train(loaded, planned.data, resume=resume, replay=replay, stop=stop)


def run_until_killed(rank: int, config: dict[str, Any], victim: int, step: int, delay_s: float, resume: bool) -> None:
    """Run this rank's part; the victim is killed so long after this run has logged a step, and before the one after the next."""
    log = Path(config["run"]["output_dir"], config["run"]["name"], "metrics.jsonl")
    before = log.stat().st_mtime_ns if log.exists() else 0

    def kill() -> None:
        while not log.exists() or log.stat().st_mtime_ns == before or log.read_text().count("\n") < step:
            time.sleep(0.005)
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    plain = TrainingSide.add_logprobs

    def add_logprobs(self: TrainingSide, record: Any) -> None:
        if victim >= 0 and record.step == step + 2:
            time.sleep(600.0)  # until the victim's end takes this rank along
        plain(self, record)

    if rank == victim:
        threading.Thread(target=kill, daemon=True).start()
    with mock.patch.object(TrainingSide, "add_logprobs", add_logprobs):
        run(rank, config, resume=resume)


def run_synchronous(rank: int, config: dict[str, Any]) -> None:
    """Run on the training ranks, as a world of their own."""
    group = dist.new_group(list(range(TRAINING)))
    if rank < TRAINING:
        assert isinstance(group, dist.ProcessGroup)
        with SubWorld(group).installed():
            run(rank, config)
    dist.barrier()


def ended_by(action: Callable[[], Any]) -> str:
    """What ended a run on this rank: the error in words, or nothing."""
    try:
        action()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def failing_from(step: int, *, at_first: bool = True) -> Iterator[None]:
    """Let the reward fail once a step's responses have come. at_first: those of its first round, else of a further one, which this
    step or a later one has."""
    plain = rollout_side.RolloutSide.score

    def score(self: Any, asked: Any, *rest: Any) -> None:
        if asked.step >= step and asked.is_first == at_first:
            raise RewardError(f"in step {asked.step}")
        plain(self, asked, *rest)

    with mock.patch.object(rollout_side.RolloutSide, "score", score):
        yield


@contextmanager
def with_cursor_only() -> Iterator[None]:
    """Restore what a synchronous run's checkpoint has: where the loader is, and nothing of what is in flight."""

    def load(self: AheadLoader, state: Mapping[str, Any]) -> None:
        PromptLoader.load_state_dict(self, {name: value for name, value in state.items() if name != "ahead"})
        self.asked, self.trained = state["ledger"]["asked"], state["ledger"]["trained"]

    with mock.patch.object(AheadLoader, "load_state_dict", load):
        yield


@contextmanager
def warmer_from(version: int) -> Iterator[None]:
    """Sample at a higher temperature than the run's, of which the trainer knows nothing, once these weights were pushed."""
    plain = VllmEngine._vllm_sampling

    def sampling(self: VllmEngine, asked: SamplingParams, request: Request) -> Any:
        assert self._version is not None
        return plain(self, replace(asked, temperature=2.0) if self._version >= version else asked, request)

    with mock.patch.object(VllmEngine, "_vllm_sampling", sampling):
        yield


@contextmanager
def stopping_after(step: int, stop: StopRequest) -> Iterator[None]:
    """Ask this rank to stop once it has pushed the weights of a step."""
    plain = WeightSync.push

    def push(self: WeightSync, version: int, *rest: Any) -> Any:
        if version == step:
            stop.received = signal.SIGTERM
        return plain(self, version, *rest)

    with mock.patch.object(WeightSync, "push", push):
        yield
