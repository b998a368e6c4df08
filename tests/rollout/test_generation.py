"""Batches shared by real engines: bit for bit what vLLM's own `generate` answers to the whole batch, whoever answers what.

One world of two ranks runs every case, as two replicas of one rank, as one of two, and with the policy's own engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import pytest

from megappo.models.hf_config import read_arch
from megappo.parallel import cpu_patches
from megappo.parallel.layout import ParallelLayout
from megappo.rollout.generation import generate
from megappo.rollout.megatron_engine import MegatronRollout
from megappo.rollout.types import Request, Response, RolloutEngine, SamplingParams
from megappo.rollout.vllm_engine import VllmEngine
from tests.bridge.engines import HeldPolicy, policy_tensors, read_checkpoint
from tests.models.checkpoints import write_checkpoint
from tests.rollout.engines import make_engine
from tests.rollout.policies import make_policy
from tests.rollout.responses import gather_responses, generate_all, plain
from tests.worlds import spawn_world

RANKS = 2
COUNT = 11
MAX_RUNNING = 4
# Some of the 131 ids end a response, so that responses end at different steps; the longest outgrow a collector's first rows.
PLAIN = SamplingParams(max_tokens=70, temperature=0.9, stop_token_ids=(17, 42, 99))
KEPT = dataclasses.replace(PLAIN, max_tokens=12, top_k=6, top_p=0.9, record_top_k_ids=True)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
UNENDING = SamplingParams(max_tokens=6)  # ranks that draw other tokens end together all the same
SAMPLINGS = {"plain": PLAIN, "kept": KEPT, "greedy": GREEDY}


# ------------------------------------------------------------------------------------------------------------- in the world


def requests(count: int = COUNT) -> list[Request]:
    """Prompts of 3 to 40 tokens as arrays; two neighbours have the same."""
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 131) for _ in range(rng.randint(3, 40))] for _ in range(count)]
    return [Request(i, numpy.array(prompts[i - i % 2], numpy.int32), seed=100 + i) for i in range(count)]


def by_vllm(engine: VllmEngine, sampling: SamplingParams) -> list[dict[str, Any]]:
    """vLLM's own answers to the whole batch, read from its lists."""
    from vllm.sampling_params import SamplingParams as VllmSampling

    def like(request: Request) -> VllmSampling:
        params = engine._vllm_sampling(sampling, request)
        params.flat_logprobs = False  # one dictionary a token: the other form of its results
        return params

    prompts = [{"prompt_token_ids": request.prompt.tolist()} for request in requests()]
    with engine._running():
        outputs = engine._llm.generate(prompts, [like(request) for request in requests()], use_tqdm=False)
        engine._finish_steps()
    answers = []
    for output in (one.outputs[0] for one in outputs):
        rows = [{token: one.logprob for token, one in row.items()} for row in output.logprobs]
        kept = [{token for token, logprob in row.items() if logprob > -numpy.inf} for row in rows]
        answers.append(
            {
                "tokens": list(output.token_ids),
                "logprobs": [numpy.float32(row[token]).item() for row, token in zip(rows, output.token_ids, strict=True)],
                "finish": output.finish_reason,
                "kept": kept if sampling.top_k_width else None,
            }
        )
    return answers


def readable(responses: Sequence[Response]) -> list[dict[str, Any]]:
    """Responses in the form of `by_vllm`."""
    answers = []
    for response, values in zip(responses, plain(responses)):
        assert values.pop("versions") == [1]
        if response.kept is not None:
            ends = response.kept.counts.cumsum()
            values["kept"] = [set(ids.tolist()) for ids in numpy.split(response.kept.ids, ends[:-1])]
            assert ends[-1] == len(response.kept.ids) and [len(ids) for ids in values["kept"]] == response.kept.counts.tolist()
        answers.append(values)
    return answers


@contextlib.contextmanager
def slow_steps(engine: Any, seconds: float) -> Iterator[None]:
    """Every step of this rank takes longer."""
    plain_poll = engine.poll

    def poll() -> list[Response]:
        time.sleep(seconds)
        return plain_poll()

    engine.poll = poll
    yield
    del engine.poll


def drained(engine: RolloutEngine, batches: Sequence[tuple[Sequence[Request], SamplingParams]], steps: int) -> list[Response]:
    """Responses of this rank to batches of which each is submitted `steps` steps after the one before."""
    found = []
    with engine.serving():
        for asked, sampling in batches:
            engine.submit(asked, sampling)
            found += [response for _ in range(steps) for response in engine.poll()]
        while engine.num_unfinished:
            found += engine.poll()
    return found


def count_entries(engine: Any, call: Callable[[], Any]) -> int:
    """Entries of vLLM's process state during a call."""
    plain_running, entries = engine._running, []

    def running() -> Any:
        entries.append(None)
        return plain_running()

    engine._running = running
    call()
    del engine._running
    return len(entries)


def run_vllm(rank: int, path: str, tp: int) -> dict[str, Any]:
    arch, layout = read_arch(path), ParallelLayout(RANKS, tp=2)
    found: dict[str, Any] = {}
    with contextlib.closing(make_engine(path, tp, max_num_seqs=MAX_RUNNING)) as engine:
        engine.connect(HeldPolicy(arch, layout, policy_tensors(arch, layout, rank, read_checkpoint(path))))
        engine.push_weights(1)
        for name, sampling in SAMPLINGS.items():
            found[name] = by_vllm(engine, sampling), readable(generate_all(engine, requests(), sampling))
        # Of tp2 it is the second rank of the replica, for which the first waits in every step.
        with slow_steps(engine, rank * (0.05 if tp == 1 else 0.005)):
            mine = generate(engine, requests(), PLAIN)
        found["slow"] = [response.number for response in mine], readable(gather_responses(mine, COUNT))
        found["one"] = readable(generate_all(engine, requests(1), PLAIN))
        found["none"] = generate(engine, [], PLAIN)
        found["entries"] = count_entries(engine, lambda: generate(engine, requests(), UNENDING))
        mixed = [(requests()[:3], PLAIN), (requests()[3:6], KEPT), (requests()[6:9], GREEDY)]
        answered = {response.number: response for response in drained(engine, mixed, 2)}
        found["mixed"] = {number: readable([response])[0] for number, response in answered.items()}
        of_rank = [dataclasses.replace(requests(1)[0], seed=rank)]
        found["unlike"] = error_of(lambda: generate(engine, of_rank, UNENDING))
        if tp == 1:
            found["interrupted"] = error_of(lambda: generate(engine, requests(), PLAIN, interrupt)), engine.num_unfinished
            found["refused"] = error_of(lambda: generate(engine, requests(), PLAIN))
    return found


def interrupt(responses: list[Response]) -> None:
    raise RuntimeError("a reward failed to start")


def run_megatron(rank: int, path: str, sizes: dict[str, int]) -> dict[str, Any]:
    engine = MegatronRollout(make_policy(path, ParallelLayout(RANKS, **sizes)).engine._engine)
    engine.push_weights(1)
    few, sampling = requests(7), dataclasses.replace(PLAIN, max_tokens=12)
    kept = dataclasses.replace(KEPT, max_tokens=12)
    mine = generate(engine, few, sampling)
    return {
        "mine": [response.number for response in mine],
        "together": readable(gather_responses(mine, len(few))),
        "alone": [readable(generate_all(engine, [request], sampling))[0] for request in few],
        "in parts": {r.number: readable([r])[0] for r in drained(engine, [(few[:3], sampling), (few[3:], sampling)], 4)},
        "kept": readable(generate_all(engine, few, kept)),
        "none": generate(engine, [], sampling),
    }


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def in_world(rank: int, path: str) -> dict[str, Any]:
    found = {f"vllm tp{tp}": run_vllm(rank, path, tp) for tp in (1, 2)}
    cpu_patches.install()
    return {**found, "megatron tp2": run_megatron(rank, path, {"tp": 2}), "megatron dp2": run_megatron(rank, path, {})}


# ----------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoint") / "llama"
    write_checkpoint(folder, "llama", head_dim=32)
    return spawn_world(in_world, RANKS, str(folder))


VLLM = pytest.mark.parametrize("engine", ["vllm tp1", "vllm tp2"])
MEGATRON = pytest.mark.parametrize("engine", ["megatron tp2", "megatron dp2"])


@VLLM
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_shared_batch_is_answered_bit_for_bit_as_a_whole_one(world, engine, name):
    for result in world:
        want, got = result[engine][name]
        assert got == want and len(got) == COUNT
    if name == "plain":
        lengths = [len(one["tokens"]) for one in got]
        assert max(lengths) > 64 and len(set(lengths)) > 5 and {one["finish"] for one in got} == {"stop", "length"}
    if name == "kept":
        widths = {len(ids) for one in got for ids in one["kept"]}
        assert max(widths) == KEPT.top_k and len(widths) > 1, "top-p leaves fewer of some tokens"


@VLLM
def test_a_slow_rank_changes_no_answer(world, engine):
    for result in world:
        assert result[engine]["slow"][1] == result[engine]["plain"][0]
    took = [result[engine]["slow"][0] for result in world]
    assert sorted(took[0] + took[1]) == list(range(COUNT))
    if engine == "vllm tp1":
        assert MAX_RUNNING <= len(took[1]) < len(took[0]), "the slow replica takes fewer"
    else:
        assert took == [list(range(rank, COUNT, 2)) for rank in range(2)], "the ranks of a replica answer in turn"


@VLLM
def test_one_request_and_none(world, engine):
    for result in world:
        assert result[engine]["one"] == result[engine]["plain"][0][:1] and result[engine]["none"] == []


@VLLM
def test_the_process_state_of_vllm_is_entered_once_for_a_batch(world, engine):
    assert [result[engine]["entries"] for result in world] == [1, 1]


def test_ranks_of_a_replica_that_draw_different_tokens_all_say_so(world):
    """Here of different seeds. Replicas may draw what they like."""
    for result in world:
        said = result["vllm tp2"]["unlike"]
        assert (
            said.startswith("ranks 0-1 of a vLLM replica drew different tokens (digests [") and result["vllm tp1"]["unlike"] == ""
        )


@VLLM
def test_requests_of_different_sampling_run_together(world, engine):
    """Rows of the sampler are as wide as those of the request that records most ids."""
    for rank, result in enumerate(world):
        mixed = result[engine]["mixed"]
        answered = range(rank, 9, 2) if engine == "vllm tp2" else range(9)
        assert sorted(mixed) == list(answered)
        for name, numbers in (("plain", range(3)), ("kept", range(3, 6)), ("greedy", range(6, 9))):
            mine = [number for number in numbers if number in answered]
            assert [mixed[number] for number in mine] == [result[engine][name][0][number] for number in mine]


def test_an_engine_that_was_interrupted_refuses_to_go_on(world):
    for result in world:
        error, left = result["vllm tp1"]["interrupted"]
        assert error == "a reward failed to start" and 0 < left <= MAX_RUNNING
        assert f"holds {left} requests of a generation that failed" in result["vllm tp1"]["refused"]


@MEGATRON
def test_the_policys_engine_answers_alike_in_any_batch(world, engine):
    for rank, result in enumerate(world):
        found = result[engine]
        tokens = lambda answers: [one["tokens"] for one in answers]
        assert tokens(found["together"]) == tokens(found["alone"]) and found["none"] == []
        assert found["mine"] == [number for number in range(7) if number % RANKS == rank]
        parts = found["in parts"]
        assert {number: one["tokens"] for number, one in parts.items()} == {
            number: found["together"][number]["tokens"] for number in found["mine"]
        }
        assert len({tuple(one["tokens"]) for one in found["together"]}) == 7
        ended = [one["finish"] == "stop" for one in found["together"]]
        assert ended == [one["tokens"][-1] in PLAIN.stop_token_ids for one in found["together"]]


@MEGATRON
def test_the_policys_engine_records_the_ids_that_it_drew_from(world, engine):
    for one in world[0][engine]["kept"]:
        assert all(token in ids and 1 <= len(ids) <= 6 for token, ids in zip(one["tokens"], one["kept"], strict=True))


def test_the_layout_of_the_policy_changes_no_token(world):
    first, second = (world[0][engine]["together"] for engine in ("megatron tp2", "megatron dp2"))
    assert [one["tokens"] for one in first] == [one["tokens"] for one in second]
