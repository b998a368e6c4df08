"""Pushes into a vLLM whose requests run, as in asynchronous runs.

One world: rank 0 holds the policy, the others run one engine after the other. transformers is the oracle of every segment, under
the weights of its own version, and the same engine of its own repetition. The second engine schedules ahead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from megappo.rollout.turns import TurnsRollout
from megappo.rollout.types import Request, Response, SamplingParams
from megappo.rollout.vllm_engine import VllmEngine
from tests.models.checkpoints import write_checkpoint
from tests.rollout.held_versions import END, Held, distances, parts_of
from tests.worlds import spawn_world

TEMPERATURE = 0.9
SAMPLING = SamplingParams(max_tokens=30, temperature=TEMPERATURE)
NARROW = replace(SAMPLING, max_tokens=15, top_k=5, record_top_k_ids=True)
TURNS = replace(SAMPLING, max_tokens=120, stop_token_ids=tuple(range(0, 131, 5)))
REQUESTS = [Request(i, tuple(range(3 + i, 30 + 5 * i)), seed=1000 + i) for i in range(6)]
PROMPTS = {one.number: list(one.prompt) for one in REQUESTS}
PUSHES = {10: 1, 21: 2}
TOLERANCE = 1e-5  # fp32: measured at most 3e-6, with and without pushes; a kept cache gives 7e-1
ENGINES = {"tp 2": 2, "two replicas": 1}


# ------------------------------------------------------------------------------------------------------------- in the world


def draw(
    held: Held, engine: Any, pushes: Mapping[int, int], sampling: SamplingParams = SAMPLING, rollout: Any = None
) -> dict[int, Response]:
    """This rank's responses; before these engine steps these versions are pushed. rollout: around the engine."""
    rollout = rollout or engine
    held.push(rollout, 0)
    with engine.between_pushes():
        rollout.submit(REQUESTS, sampling)
    found, step = {}, 0
    while rollout.num_unfinished:
        if step in pushes:
            held.push(rollout, pushes[step])
        with engine.between_pushes():
            found.update({one.number: one for one in rollout.poll()})
        step += 1
    return found


def segments(found: Mapping[int, Response]) -> dict[int, list]:
    return {number: parts_of(one) for number, one in found.items()}


def of_engine(held: Held, engine: VllmEngine) -> dict[str, Any]:
    def cut(name: str = "_settle", value: Any = engine._settle) -> dict[int, list]:
        with mock.patch.object(engine, name, value):
            return segments(draw(held, engine, PUSHES))

    def turns(pushes: Mapping[int, int]) -> dict[int, list]:
        limits = {"max_turns": 4, "turn_tokens": 30, "max_prompt_tokens": 80}
        return segments(draw(held, engine, pushes, TURNS, TurnsRollout(engine, lambda turn: [5, 6 + turn.number], **limits)))

    found = {"plain": segments(draw(held, engine, {})), "cut": cut(), "again": cut()}
    found["later"] = segments(draw(held, engine, {step + 1: version for step, version in PUSHES.items()}))
    found["keep"], found["keep again"] = cut("_cache_after_push", "keep"), cut("_cache_after_push", "keep")
    found["not settled"] = cut("_settle", lambda: None)
    narrow = draw(held, engine, {5: 1, 10: 2}, NARROW)
    found["kept"] = {
        i: (one.tokens.tolist(), one.kept.counts.tolist(), one.kept.ids.tolist()) for i, one in narrow.items() if one.kept
    }
    found["turns"], found["turns again"] = turns({5: 1, 20: 2}), turns({5: 1, 20: 2})
    found["stop"] = stopped_across_a_cut(held, engine, found["cut"])
    found["refused"] = refused(held, engine)
    return found


def stopped_across_a_cut(held: Held, engine: VllmEngine, cut: Mapping[int, list]) -> tuple:
    """A response whose stop string a push cuts in two, and the same without that string."""
    number = min(cut)
    word = f"<{cut[number][0][0][-1]}><{cut[number][1][0][0]}>"
    with mock.patch.object(engine, "_detokenize", lambda tokens: "".join(f"<{token}>" for token in tokens)):
        drawn = draw(held, engine, PUSHES, replace(SAMPLING, stop=(word,)))[number]
    return parts_of(drawn), drawn.finish, cut[number]


def refused(held: Held, engine: VllmEngine) -> str:
    """Of a synchronous run, whose push with running requests is a mistake."""
    with engine.between_pushes():
        engine.submit(REQUESTS, SAMPLING)
        for _ in range(5):
            engine.poll()
    with mock.patch.object(engine, "_cache_after_push", None), pytest.raises(RuntimeError) as error:
        held.push(engine, 1)
    return str(error.value)


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """vLLM schedules steps ahead, which it otherwise does on a GPU only."""
    from vllm.platforms.cpu import CpuPlatform

    plain = CpuPlatform.check_and_update_config.__func__

    def kept(cls: Any, config: Any) -> None:
        plain(cls, config)
        config.scheduler_config.async_scheduling = True

    with mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(kept)):
        yield


def in_world(rank: int, path: str) -> dict[str, Any]:
    held, found = Held(path), {}
    for name, tp in ENGINES.items():
        if rank == 0:
            held.serve(held.connect(tp))
            continue
        is_ahead = name == "two replicas"
        with ahead() if is_ahead else contextlib.nullcontext(), held.engine(tp) as engine:
            found[name] = of_engine(held, engine)
            held.ask(END)
            found[name]["queue"] = engine._llm.llm_engine.engine_core.engine_core.batch_queue is not None
    return found


# ------------------------------------------------------------------------------------------------------------------ tests


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "llama", head_dim=32)
    return str(folder)


@pytest.fixture(scope="module")
def world(checkpoint: str) -> list[dict[str, Any]]:
    return spawn_world(in_world, 3, checkpoint)


def of(world: list[dict[str, Any]], name: str, what: str) -> dict[int, Any]:
    """The responses of all ranks of the engine; two replicas drew the same."""
    ranks = [rank[name][what] for rank in world[1:]]
    assert ENGINES[name] == 2 or ranks[0] == ranks[1]
    return ranks[0] | ranks[1]


def test_every_segment_has_the_log_probs_of_its_own_version(world, checkpoint):
    for name in ENGINES:
        for what in ("plain", "cut", "later"):
            found = of(world, name, what)
            assert len(found) == len(REQUESTS) and max(distances(checkpoint, PROMPTS, found, TEMPERATURE)) < TOLERANCE
        first, later = distances(checkpoint, PROMPTS, of(world, name, "keep"), TEMPERATURE)
        assert first < TOLERANCE and later > 0.1, "negative control: the cache of older weights shows"


def test_pushes_at_the_same_steps_repeat_to_the_bit(world):
    for name in ENGINES:
        cut = of(world, name, "cut")
        assert cut == of(world, name, "again") and of(world, name, "keep") == of(world, name, "keep again")
        assert cut != of(world, name, "later"), "negative control: a step later"
        # The version is that of the step that drew the token: the prompts take the first step, and each later push costs none.
        lengths = [[(len(tokens), version) for tokens, _, version in parts] for parts in cut.values()]
        assert lengths == [[(10, 0), (11, 1), (9, 2)]] * len(REQUESTS)


def test_no_step_that_is_scheduled_ahead_is_lost(world):
    assert [world[1][name]["queue"] for name in ENGINES] == [False, True]
    plain, lost = of(world, "two replicas", "plain"), of(world, "two replicas", "not settled")
    for number, ((tokens, _, _), *_) in of(world, "two replicas", "cut").items():
        assert tokens == plain[number][0][0][: len(tokens)]
    assert {len(parts[0][0]) for parts in lost.values()} == {9}, "negative control"


def test_recorded_ids_of_all_segments_are_kept(world):
    for name in ENGINES:
        for tokens, counts, ids in of(world, name, "kept").values():
            assert len(tokens) == len(counts) == NARROW.max_tokens and set(counts) == {NARROW.top_k}
            assert all(token in ids[5 * i : 5 * i + 5] for i, token in enumerate(tokens))


def test_turns_of_an_environment_are_cut_too(world, checkpoint):
    for name in ENGINES:
        found = of(world, name, "turns")
        assert found == of(world, name, "turns again") and max(distances(checkpoint, PROMPTS, found, TEMPERATURE)) < TOLERANCE
        pairs = [(a, b) for parts in found.values() for a, b in zip(parts, parts[1:])]
        assert any(a[1] and b[1] and a[2] != b[2] for a, b in pairs), "a turn of two segments"
        assert any(b[1] is None for _, b in pairs), "observations"


def test_a_stop_string_that_a_push_cuts_ends_the_response(world):
    for name in ENGINES:
        for rank in world[1:]:
            (first, second), finish, uncut = rank[name]["stop"]
            assert finish == "stop" and first == uncut[0] and second == tuple(part[:1] for part in uncut[1][:2]) + (1,)


def test_a_synchronous_run_refuses_a_push_into_running_requests(world):
    assert all("requests are still running" in rank[name]["refused"] for rank in world[1:] for name in ENGINES)
