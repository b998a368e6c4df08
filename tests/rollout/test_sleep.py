"""Memory that vLLM gives back (`rollout.sleep`), and long seeded prompts, with real engines on a CPU.

`SleepingCpuWorker` really frees the cache and the weights and brings them back full of NaN, so an engine that sleeps must answer
bit for bit like one that never does: everything it reads was pushed, restored or emptied. One world of two ranks runs every case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from megappo.models.hf_config import read_arch
from megappo.parallel.layout import ParallelLayout
from megappo.rollout import vllm_engine
from megappo.rollout.types import Request, SamplingParams
from megappo.rollout.vllm_engine import VllmEngine
from megappo.rollout.vllm_memory import VllmMemory, unregistered_tensors
from tests.bridge.engines import HeldPolicy, policy_tensors, random_checkpoint, read_checkpoint
from tests.models.checkpoints import write_checkpoint
from tests.rollout.engines import make_engine
from tests.rollout.responses import generate_all, plain
from tests.worlds import spawn_world

RANKS = 2
SEEDED = SamplingParams(max_tokens=6, temperature=0.9)
LONG = 1300
# name -> (checkpoint case, changes of its config, engine tp)
CASES: dict[str, tuple[str, dict, int]] = {
    "llama to tp2": ("llama", dict(head_dim=32), 2),
    "qwen2 tied with biases to tp1 x 2": ("qwen2_tied", dict(hidden_size=128), 1),
    "experts to tp1 x 2": ("qwen3_moe", dict(head_dim=32, moe_intermediate_size=64), 1),
}
# What sleeps in them; "all" is the cache too, so that the cache alone is asked once.
MODES = {name: ("none", "cache", "all") if name == "llama to tp2" else ("none", "all") for name in CASES}
SLEEPS = [(name, sleep) for name, modes in MODES.items() for sleep in modes[1:]]


# ------------------------------------------------------------------------------------------------------------- in the world


def requests(length: int = 150, count: int = 4) -> list[Request]:
    """Longer than vLLM's 128-token cache blocks; the last two are of one prompt."""
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(3, 131) for _ in range(length)) for _ in range(count - 1)]
    return [Request(i, prompt, seed=i) for i, prompt in enumerate([*prompts, prompts[-1]])]


def pushing(engine: VllmEngine, path: str, rank: int) -> list[Any]:
    """A function for each of two versions of the weights that makes them the policy's."""
    arch, layout = read_arch(path), ParallelLayout(RANKS, tp=2)
    versions = [policy_tensors(arch, layout, rank, weights) for weights in (read_checkpoint(path), random_checkpoint(arch, 7))]
    policy = HeldPolicy(arch, layout)
    engine.connect(policy)
    return [lambda tensors=tensors: policy.tensors.update(tensors) for tensors in versions]


def memory_of(engine: VllmEngine) -> dict[str, int]:
    """Bytes in storages, weights of packed products not counted."""
    worker = engine._llm.llm_engine.model_executor.driver_worker.worker
    model = worker.get_model()
    tensors = {"cache": worker.model_runner.kv_caches, "weights": (*model.parameters(), *model.buffers())}
    return {
        name: sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in ts}.values()) for name, ts in tensors.items()
    }


def answers(engine: VllmEngine, asked: Sequence[Request] | None = None) -> list[dict]:
    return plain(generate_all(engine, requests() if asked is None else asked, SEEDED))


def run_steps(rank: int, path: str, tp: int, sleep: str) -> dict[str, Any]:
    """Two steps of a run as PPO takes them, an evaluation after the first, and what is there in between."""
    with contextlib.closing(make_engine(path, tp, sleep=sleep)) as engine:
        first, second = pushing(engine, path, rank)
        found: dict[str, Any] = {"answers": [], "memory": {"built": memory_of(engine)}}
        for step, become in enumerate((first, second, first)):
            become()
            engine.push_weights(step)
            found["memory"][f"pushed {step}"] = memory_of(engine)
            found["answers"] += [answers(engine), answers(engine)]  # an evaluation, then the next step
            found["memory"][f"answered {step}"] = memory_of(engine)
            engine.sleep()
            found["memory"][f"asleep {step}"] = memory_of(engine)
            found["refused"] = error_of(lambda: generate_all(engine, requests(), SEEDED))
            engine.sleep()
        found["unregistered"] = len(unregistered_tensors(engine._llm.llm_engine.model_executor.driver_worker.worker))
        return found


def run_faults(rank: int, path: str) -> dict[str, Any]:
    """Leave one thing out at a time."""
    found = {}
    with contextlib.closing(make_engine(path, 1, sleep="all")) as engine:
        first, _ = pushing(engine, path, rank)
        first()
        engine.push_weights(0)
        worker = engine._llm.llm_engine.model_executor.driver_worker.worker
        attention = next(module for module in worker.get_model().modules() if hasattr(module, "cpu_linear"))
        attention.table = torch.arange(4.0)  # a tensor that vLLM does not know of
        engine.sleep()
        found["table asleep"] = attention.table.untyped_storage().nbytes()
        engine.push_weights(1)
        found["table"] = attention.table.tolist()
        found["right"] = answers(engine)
        engine.sleep()
        with engine._running():
            engine._memory.wake_weights()  # and no push
        found["unpushed"] = error_of(lambda: generate_all(engine, requests(), SEEDED))
    return found


def run_long(rank: int, path: str) -> dict[str, Any]:
    """Seeded prompts that together do not fit into what vLLM takes at once, and each of them alone."""
    several = requests(LONG, 10)
    with contextlib.closing(make_engine(path, 1, max_model_len=LONG + 12, max_num_seqs=8)) as engine:
        for become in pushing(engine, path, rank)[:1]:
            become()
        engine.push_weights(0)
        scheduler = engine._llm.llm_engine.vllm_config.scheduler_config
        found: dict[str, Any] = {"at once": scheduler.max_num_batched_tokens}
        found["together"] = answers(engine, several)
        found["alone"] = [answers(engine, [request])[0] for request in several]
    with contextlib.closing(make_engine(path, 1, max_model_len=6000, max_num_seqs=8)) as engine:
        pushing(engine, path, rank)[0]()
        engine.push_weights(0)
        longest = dataclasses.replace(requests(5900, 2)[0], seed=1)
        found["longest"] = [len(response.tokens) for response in generate_all(engine, [longest, longest], SEEDED)]
    with chunked_prefill(), contextlib.closing(make_engine(path, 1, max_model_len=LONG + 12, max_num_seqs=8)) as engine:
        pushing(engine, path, rank)[0]()
        engine.push_weights(0)
        found["chunked"] = error_of(lambda: generate_all(engine, several, SEEDED))
    return found


@contextlib.contextmanager
def chunked_prefill() -> Iterator[None]:
    real = vllm_engine.vllm_options
    vllm_engine.vllm_options = lambda *args, **kwargs: {**real(*args, **kwargs), "enable_chunked_prefill": True}
    yield
    vllm_engine.vllm_options = real


def error_of(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def in_world(rank: int, folder: str) -> dict[str, Any]:
    steps = {
        name: {sleep: run_steps(rank, f"{folder}/{name}", tp, sleep) for sleep in MODES[name]} for name, (_, _, tp) in CASES.items()
    }
    return {
        "steps": steps,
        "faults": run_faults(rank, f"{folder}/llama to tp2"),
        "long": run_long(rank, f"{folder}/long"),
    }


# ----------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, (case, changes, _) in CASES.items():
        write_checkpoint(folder / name, case, **changes)
    write_checkpoint(folder / "long", "llama", head_dim=32, max_position_embeddings=8192)
    return spawn_world(in_world, RANKS, str(folder))


@pytest.mark.parametrize("name, sleep", SLEEPS)
def test_an_engine_that_sleeps_answers_like_one_that_does_not(world, name, sleep):
    for result in world:
        steps = result["steps"][name]
        assert steps[sleep]["answers"] == steps["none"]["answers"]
        first, _, second, *_ = steps["none"]["answers"]
        assert first != second, "the versions of the weights differ"


@pytest.mark.parametrize("name", CASES)
def test_memory_is_there_while_it_is_needed(world, name):
    for result in world:
        memory = {sleep: found["memory"] for sleep, found in result["steps"][name].items()}
        whole = memory["none"]["built"]
        assert all(there == whole for there in memory["none"].values()) and min(whole.values()) > 0
        assert all(there == {"cache": 0, "weights": whole["weights"]} for there in memory.get("cache", {}).values())
        for when, there in memory["all"].items():
            assert there == {"cache": 0, "weights": 0 if when.startswith("asleep") else whole["weights"]}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_asked_of_weights_that_sleep(world, name):
    for result in world:
        steps = result["steps"][name]
        assert "weights are asleep (rollout.sleep: all): push weights" in steps["all"]["refused"]
        assert {sleep: found["refused"] for sleep, found in steps.items() if sleep != "all"} == dict.fromkeys(MODES[name][:-1], "")


def test_what_no_push_writes_comes_back(world):
    for result in world:
        faults = result["faults"]
        assert faults["table asleep"] == 0 and faults["table"] == [0.0, 1.0, 2.0, 3.0]
        assert "given back and not pushed again" in faults["unpushed"], "negative control: a step without its push"


def test_long_seeded_prompts_are_not_cut_in_pieces_on_a_cpu(world):
    for result in world:
        long = result["long"]
        assert len(long["together"]) // RANKS * LONG > long["at once"], "those of a replica do not fit at once"
        for together, alone in zip(long["together"], long["alone"], strict=True):
            # A product of more rows is rounded otherwise on some processors; another seed would draw other tokens.
            assert {**together, "logprobs": None} == {**alone, "logprobs": None}
            assert together["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-5)
        assert long["longest"] == [6, 6], "a prompt longer than what vLLM takes at once by default"
        assert "CPU Generator does not use offset" in long["chunked"], "negative control"


# ------------------------------------------------------------------------------------------ the calls, without an engine


class FakeLLM:
    """Checks what vLLM checks (EngineCore, Executor) and logs the calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.paused, self.sleeping = False, set()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.paused = True
        self.log.append(f"sleep {level}")
        if level:
            self.sleeping |= {"weights", "kv_cache"}

    def release_kv_cache_memory(self) -> None:
        assert self.paused and not self.sleeping
        self.log.append("release")
        self.sleeping.add("kv_cache")

    def wake_up(self, tags: list[str]) -> None:
        assert self.sleeping.issuperset(tags)
        self.log.append(f"wake {' '.join(tags)}")
        self.sleeping -= set(tags)
        self.paused = bool(self.sleeping)


class FakeWorker:
    """One weight and a cache."""

    def __init__(self) -> None:
        self.model_runner = type("Runner", (), {"kv_caches": [torch.ones(3)]})()

    def get_model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    "sleep, calls",
    [
        ("none", []),
        ("cache", ["sleep 0", "release", "wake kv_cache", "sleep 0", "release"]),
        ("all", ["sleep 0", "release", "wake kv_cache", "sleep 0", "release", "sleep 2", "wake weights"]),
    ],
)
def test_the_calls_of_a_step(sleep, calls):
    llm, worker = FakeLLM(), FakeWorker()
    memory = VllmMemory(llm, worker, sleep)
    memory.sleep_cache()  # once built
    memory.wake_weights()  # the first push
    memory.wake_cache()
    assert not llm.paused and worker.model_runner.kv_caches[0].any() == (sleep == "none")
    memory.sleep_cache()
    memory.sleep_weights()
    memory.wake_weights()
    assert llm.log == calls


def test_unregistered_tensors_are_of_modules_and_what_they_own():
    worker = FakeWorker()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    Owned = type("Owned", (), {"__module__": "vllm.anything"})
    other = type("Other", (), {"__module__": "elsewhere"})()
    owned, model[0].owned, model[0].other = Owned(), None, other
    model[0].owned, owned.scale, other.scale = owned, torch.ones(5), torch.ones(6)
    model[0].table, model[0].alias = [torch.ones(7)], model[0].weight.data[0]
    model[1].kv_cache = worker.model_runner.kv_caches[0][:2]
    model[1].again = owned.scale[1:]
    worker.get_model = lambda: model
    assert sorted(tensor.numel() for tensor in unregistered_tensors(worker)) == [5, 7]
