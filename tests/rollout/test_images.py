"""Prompts with images in vLLM: its log-probs are the trainer's, over pushes of changed towers, with tp 1 and 2."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megappo.parallel import cpu_patches
from megappo.parallel.layout import ParallelLayout
from megappo.rollout.megatron_engine import MegatronRollout
from megappo.rollout.types import Request, SamplingParams
from tests.engine.test_images import samples_of
from tests.models.vision_cases import write_questions, write_vision_checkpoint
from tests.rollout.engines import make_engine
from tests.rollout.policies import distance, make_policy
from tests.rollout.responses import generate_all
from tests.rollout.test_any_model_push import sharded_policy
from tests.worlds import spawn_world

TOLERANCE = 1e-4
# kind -> (tp of vLLM, layout of the policy)
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen2_5_vl": (1, {"pp": 2}),
    "qwen3_vl": (2, {"tp": 2}),
    "internvl": (2, {"pp": 2}),
}
NORMALISED = ("qwen2_5_vl", "qwen3_vl")
"""Kinds whose model in vLLM normalises pixels."""
SAMPLING, GREEDY = (SamplingParams(max_tokens=8, temperature=temperature) for temperature in (1.0, 0.0))


def of_two_ranks(_rank: int, folder: str) -> dict[str, Any]:
    from megappo.rollout.vllm_images import restore_normalisation

    cpu_patches.install()
    found = {}
    for kind, (tp, layout) in CASES.items():
        path = str(Path(folder, kind))
        samples, images = samples_of(Path(folder), kind)
        policy = make_policy(path, ParallelLayout(2, **layout))
        for chunk in policy.engine._engine.chunks:
            chunk.images = images.store
        # Prompts alone, without the answers of the samples.
        asked = [Request(number, numpy.array(one.coded[:-7]), seed=number) for number, one in enumerate(samples)]

        def far() -> float:
            return distance(policy, asked, generate_all(engine, asked, SAMPLING))

        with contextlib.closing(make_engine(path, tp, images=images.store)) as engine:
            engine.connect(policy.engine)
            found[kind] = of_kind = {"verified": engine.push_weights(1)["verified"], "pushed": far()}
            before = generate_all(engine, asked, SAMPLING)
            samplers = engine, MegatronRollout(policy.engine._engine)
            best, same = ([one.tokens.tolist() for one in generate_all(sampler, asked, GREEDY)] for sampler in samplers)
            of_kind["both samplers"] = best == same
            scale_tower(policy, 1.3)
            of_kind["stale"] = distance(policy, asked, before)
            engine.push_weights(2)
            of_kind["pushed again"] = far()
            scale_tower(policy, 0.7)
            with unsalted(engine):
                far()
                engine.push_weights(3)
                of_kind["old features"] = far()
            of_kind["new features"] = far()
            if kind in NORMALISED:
                worker = engine._llm.llm_engine.model_executor.driver_worker.worker
                with torch.inference_mode():
                    for buffer in worker.get_model().visual.input_norm.buffers():
                        buffer.fill_(0.01)
                engine.push_weights(4)
                of_kind["other constants"] = far()
                with engine.in_world():
                    restore_normalisation(worker)
                engine.push_weights(5)
                of_kind["restored constants"] = far()
            if kind == "qwen2_5_vl":
                of_kind |= from_fsdp2(engine, path, images, asked)
    return found


def from_fsdp2(engine: Any, path: str, images: Any, asked: list[Request]) -> dict[str, Any]:
    """The same vLLM, with the weights of another engine."""
    policy = sharded_policy(path, images=images.store)
    scale_tower(policy, 1.2)
    engine.connect(policy.engine)
    verified = engine.push_weights(6)["verified"]
    drawn = generate_all(engine, asked, SAMPLING)
    own = generate_all(MegatronRollout(policy.engine._engine), asked, GREEDY)
    best = generate_all(engine, asked, GREEDY)
    same = [one.tokens.tolist() for one in own] == [one.tokens.tolist() for one in best]
    return {"fsdp2": distance(policy, asked, drawn), "fsdp2 verified": verified, "fsdp2 both samplers": same}


def scale_tower(policy: Any, factor: float) -> None:
    with torch.no_grad():
        for name, parameter in policy.engine.named_parameters().items():
            if name.startswith("visual.") and ("merger" in name or "projector" in name):
                parameter.mul_(factor)


@contextlib.contextmanager
def unsalted(engine: Any) -> Any:
    """Features of images are found again after a push, as without the version in their key."""
    engine._cache_salt = lambda: "always"
    yield
    del engine._cache_salt


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("images")
    write_questions(folder)
    for kind in CASES:
        write_vision_checkpoint(folder / kind, kind)
        samples_of(folder, kind)
    return spawn_world(of_two_ranks, 2, str(folder))[0]


@pytest.mark.parametrize("kind", CASES)
def test_the_sampler_sees_what_the_trainer_sees(found, kind: str) -> None:
    assert found[kind]["verified"] == 1.0 and found[kind]["both samplers"]
    for when in ("pushed", "pushed again", "new features", *(["restored constants"] if kind in NORMALISED else [])):
        assert found[kind][when] < TOLERANCE, when


def test_the_sampler_sees_what_fsdp2_sees(found) -> None:
    of_kind = found["qwen2_5_vl"]
    assert of_kind["fsdp2 verified"] == 1.0 and of_kind["fsdp2 both samplers"] and of_kind["fsdp2"] < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "fault"), [*itertools.product(CASES, ("stale", "old features")), *((kind, "other constants") for kind in NORMALISED)]
)
def test_a_fault_is_seen(found, kind: str, fault: str) -> None:
    """Negative control."""
    assert found[kind][fault] > 100 * TOLERANCE
