"""A Megatron policy that trains, pushed into vLLM from every kind of layout: experts, interleaved and uneven pipelines, cp.

The oracle is the trainer's own forward pass: what PPO needs is that the engine samples from the model that is trained. That the
trainer computes what transformers computes is tests/models and tests/parity. One world of two ranks runs every case.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megappo.bridge.sync import Route
from megappo.models.hf_config import read_arch
from megappo.models.weight_map import hf_tensors
from megappo.parallel import cpu_patches
from megappo.parallel.layout import ParallelLayout
from megappo.rollout.megatron_engine import MegatronRollout
from megappo.rollout.types import Request, Response, SamplingParams
from megappo.rollout.vllm_engine import VllmEngine
from tests.bridge.engines import layout_mistakes, read_checkpoint, renamed
from tests.models.checkpoints import write_checkpoint
from tests.rollout import truncated
from tests.rollout.engines import make_engine
from tests.rollout.policies import distance, make_policy, train_once
from tests.rollout.responses import generate_all
from tests.worlds import spawn_world

RANKS = 2
TOLERANCE = 1e-4  # fp32; measured at most 3e-6 here, a wrong expert gives 1e-1 and more
GREEDY = SamplingParams(max_tokens=5, temperature=0.0)

_MOE = dict(head_dim=32, num_hidden_layers=4, mlp_only_layers=[1])
_LLAMA = dict(head_dim=32, num_hidden_layers=4)
# name -> (checkpoint case, changes of its config, engine tp, train layouts)
CASES: dict[str, tuple[str, dict, int, tuple[dict, ...]]] = {
    # 64 columns of an expert are whole blocks of vLLM's kernel
    "experts to tp1 x 2": (
        "qwen3_moe",
        {**_MOE, "moe_intermediate_size": 64},
        1,
        (
            dict(ep=2),
            dict(tp=2, etp=2, sequence_parallel=True),
            dict(pp=2, vpp=2),
        ),
    ),
    # 24 columns are 12 a rank, which vLLM pads to a block of 32
    "experts to tp2": (
        "qwen3_moe",
        _MOE,
        2,
        (
            dict(tp=2, ep=2, sequence_parallel=True),
            dict(cp=2, ep=2),
            dict(etp=2),
            dict(pp=2, layers_per_stage=(1, 3)),
        ),
    ),
    "unnormalised experts to tp1 x 2": ("qwen3_moe", {**_MOE, "norm_topk_prob": False}, 1, (dict(ep=2),)),
    "windows in turn to tp1 x 2": ("gemma3", _LLAMA, 1, (dict(tp=2, sequence_parallel=True),)),
    "one KV head to tp2": ("gemma3", {**_LLAMA, "num_key_value_heads": 1}, 2, (dict(tp=2), dict(pp=2))),
    "dense to tp1 x 2": ("llama", _LLAMA, 1, (dict(pp=2, vpp=2), dict(cp=2))),
    "dense to tp2": (
        "llama",
        _LLAMA,
        2,
        (
            dict(tp=2, sequence_parallel=True),
            dict(pp=2, layers_per_stage=(3, 1)),
            dict(pp=2, vpp=2, layers_per_stage=(1, 0, 2, 1)),
        ),
    ),
}
FAULTY = "experts to tp1 x 2"
# Cases and layouts that also sample with top-k and top-p: what cuts the vocabulary, the tokens and the layers. The last layout of
# TIED has the whole output layer on every rank.
TRUNCATED = {"dense to tp1 x 2": ("cp2",), "dense to tp2": ("tp2", "vpp2")}
TIED = "dense to tp1 x 2"


# ------------------------------------------------------------------------------------------------------------- in the world


def requests() -> list[Request]:
    """Prompts of 3 to 30 tokens, and two beyond vLLM's 128-token cache blocks, where stale keys and values would be used."""
    rng = random.Random(4)
    lengths = [rng.randint(3, 30) for _ in range(5)] + [170, 170]
    return [Request(i, tuple(rng.randrange(3, 131) for _ in range(n)), seed=i) for i, n in enumerate(lengths)]


def push_and_draw(engine: VllmEngine, policy: Any, version: int) -> dict[str, Any]:
    metrics = engine.push_weights(version)
    responses = generate_all(engine, requests(), GREEDY)
    return {"distance": distance(policy, requests(), responses), "responses": responses, "metrics": metrics}


def draws_the_same(policy: Any, responses: list[Response]) -> bool:
    """True if the trainer itself draws these tokens."""
    greedy = generate_all(MegatronRollout(policy.engine._engine), requests(), GREEDY)
    return [r.tokens.tolist() for r in responses] == [r.tokens.tolist() for r in greedy]


def run_case(rank: int, path: str, name: str) -> dict[str, Any]:
    _, _, engine_tp, layouts = CASES[name]
    arch = read_arch(path)
    results: dict[str, Any] = {"push": {}}
    with contextlib.closing(make_engine(path, engine_tp)) as engine:
        model = weakref.ref(engine.receiver.model)
        destination = engine.receiver.describe(hf_tensors(arch))
        results["layout"] = layout_mistakes(destination, arch, read_checkpoint(path), engine_tp, rank % engine_tp)
        for sizes in layouts:
            policy = make_policy(path, ParallelLayout(RANKS, **sizes))
            engine.connect(policy.engine)
            loaded = push_and_draw(engine, policy, 1)
            train_once(policy)
            stale = distance(policy, requests(), loaded.pop("responses"))
            trained = push_and_draw(engine, policy, 2)
            trained["same_tokens"] = draws_the_same(policy, trained.pop("responses"))
            results["push"][str(policy.engine.groups.layout)] = [loaded, trained, stale]
            if samples_truncated(name, str(policy.engine.groups.layout)):
                found = truncated.measure(engine, policy, requests())
                results.setdefault("truncated", {})[str(policy.engine.groups.layout)] = found
        if name == TIED:
            results["ties"] = truncated.measure_ties(engine, policy, requests(), 3)
        if name == FAULTY:
            results["faults"] = run_faults(engine, path)
    results["freed"] = model() is None
    return results


def samples_truncated(name: str, layout: str) -> bool:
    return any(word in layout.split() for word in TRUNCATED.get(name, ()))


def run_faults(engine: VllmEngine, path: str) -> dict[str, Any]:
    """One thing wrong at a time, in what the policy says it holds or in how the engine takes it."""
    policy = make_policy(path, ParallelLayout(RANKS, ep=2))
    result: dict[str, Any] = {}

    def push(rename: Callable[[str], str]) -> float:
        """Distance after a push by a map that calls some tensors by others' names: consistent, so that checksums pass."""
        source = policy.engine
        pieces = renamed(source.pieces(), rename)
        engine.connect(SimpleNamespace(arch=source.arch, merged_parameters=source.merged_parameters, pieces=lambda: pieces))
        assert engine.push_weights(3)["verified"]
        return distance(policy, requests(), generate_all(engine, requests(), GREEDY))

    result["right"] = push(lambda hf: hf)
    result["experts"] = push(lambda hf: exchanged(hf, "layers.0.mlp.experts.2.", "layers.0.mlp.experts.5."))
    result["gate_up"] = push(lambda hf: exchanged(hf, "experts.1.gate_proj", "experts.1.up_proj"))

    update_by_vllm(engine, policy, 1)
    result["by vLLM"] = distance(policy, requests(), generate_all(engine, requests(), GREEDY))

    receiver = engine.receiver
    engine.receiver = Misplacing(receiver)
    engine.connect(policy.engine)
    result["misplaced"] = error_of(lambda: engine.push_weights(4))
    engine.receiver = receiver
    engine.connect(policy.engine)
    result["again"] = engine.push_weights(5)["verified"]

    with kept_expert_kernels():
        engine.push_weights(6)
        result["kept_kernels"] = distance(policy, requests(), generate_all(engine, requests(), GREEDY))
    engine.push_weights(7)
    result["renewed_kernels"] = distance(policy, requests(), generate_all(engine, requests(), GREEDY))

    sync = engine._sync
    sync._rounds = [one._replace(local=tuple(m for m in one.local if "experts" not in m.hf)) for one in sync._rounds]
    result["dropped"] = error_of(lambda: engine.push_weights(8))
    return result


def update_by_vllm(engine: VllmEngine, policy: Any, tp: int) -> None:
    """A push through vLLM's own methods alone, as another program would write it."""
    llm = engine._llm
    with engine._running():
        llm.init_weight_transfer_engine({"init_info": {"route": Route.colocated(policy.engine, tp), "policy": policy.engine}})
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": 4}})
        llm.finish_weight_update("4")
        assert llm.reset_prefix_cache() and llm.get_weight_version() == "4"


def exchanged(name: str, a: str, b: str) -> str:
    return name.replace(a, "\0").replace(b, a).replace("\0", b)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


class Misplacing:
    """A receiver that lands expert 6 in the place of expert 7 and the other way round."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.describe = real.describe

    @contextlib.contextmanager
    def session(self, moves: Any, inspect: Any) -> Iterator[Any]:
        other = {6: 7, 7: 6}
        with self._real.session(moves, inspect) as land:
            yield lambda move, values: land(move._replace(d_slot=other.get(move.d_slot, move.d_slot)), values)


@contextlib.contextmanager
def kept_expert_kernels() -> Iterator[None]:
    """vLLM's own reload of experts on a CPU, without what the bridge does about it."""

    from megappo.bridge.vllm_loader import VllmReceiver

    def close_module(receiver: VllmReceiver, name: str) -> None:
        layer = receiver._modules[name]
        receiver._api.process(layer, receiver._api.info(layer))

    real, VllmReceiver.close_module = VllmReceiver.close_module, close_module
    yield
    VllmReceiver.close_module = real


def in_world(rank: int, folder: str) -> dict[str, Any]:
    cpu_patches.install()
    return {name: run_case(rank, f"{folder}/{name}", name) for name in CASES}


# ----------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, (case, changes, _, _) in CASES.items():
        write_checkpoint(folder / name, case, **changes)
    return spawn_world(in_world, RANKS, str(folder))


PUSHES = [
    pytest.param(name, str(ParallelLayout(RANKS, **sizes)), id=f"{ParallelLayout(RANKS, **sizes)} {name}")
    for name, case in CASES.items()
    for sizes in case[3]
]


@pytest.mark.parametrize("name, layout", PUSHES)
def test_the_engine_is_the_trainers_model_before_and_after_an_update(world, name, layout):
    for result in world:
        loaded, trained, stale = result[name]["push"][layout]
        assert loaded["distance"] < TOLERANCE and trained["distance"] < TOLERANCE and trained["same_tokens"]
        assert stale > 0.1, "the comparison would notice weights of before the update"


@pytest.mark.parametrize("name", CASES)
def test_vllm_describes_its_parameters_as_its_layers_define_them(world, name):
    assert [result[name]["layout"] for result in world] == [[], []]


def test_every_byte_of_an_update_is_accounted_for(world):
    for name in CASES:
        for layout in world[0][name]["push"]:
            for step in range(2):
                metrics = [result[name]["push"][layout][step]["metrics"] for result in world]
                assert sum(m["bytes_sent"] for m in metrics) == sum(m["bytes_received"] for m in metrics)
                assert {m["verified"] for m in metrics} == {1.0}


def test_a_closed_engine_frees_its_model_at_once(world):
    """Although vLLM's worker, which built the receiver, is garbage of later."""
    assert all(result[name]["freed"] for result in world for name in CASES)


@pytest.fixture(scope="module")
def faults(world) -> list[dict[str, Any]]:
    return [result[FAULTY]["faults"] for result in world]


@pytest.mark.parametrize("fault", ["experts", "gate_up"])
def test_exchanged_tensors_show_in_logprobs_although_checksums_pass(faults, fault):
    for result in faults:
        assert result["right"] < TOLERANCE < 0.01 < result[fault]


def test_an_update_through_vllms_own_interface_lands_the_policy(faults):
    """In an engine that the push before left with exchanged tensors."""
    for result in faults:
        assert result["by vLLM"] < TOLERANCE < 0.01 < result["gate_up"]


def test_a_misplaced_expert_fails_its_checksum(faults):
    for result in faults:
        assert "push of weights 4: rank 0: model.layers.0.mlp.experts" in result["misplaced"]
        assert "arrived with checksum" in result["misplaced"]
        assert result["again"] == 1.0


def test_a_missing_expert_is_reported(faults):
    assert all("rectangles of model.layers.0.mlp.experts.routed_experts missing" in result["dropped"] for result in faults)


def test_kernels_of_experts_must_be_renewed(faults):
    """Fails when a vLLM no longer needs it: then `VllmReceiver.close_module` can do without."""
    for result in faults:
        assert result["kept_kernels"] > 0.1 and result["renewed_kernels"] < TOLERANCE


# ----------------------------------------------------------------------------------------------------- top-k and top-p

TRUNCATED_PUSHES = [param for param in PUSHES if samples_truncated(*param.values)]


@pytest.mark.parametrize("name, layout", TRUNCATED_PUSHES)
@pytest.mark.parametrize("how", ["vllm", "top_k", "stopped", "worded", "megatron"])
def test_logprobs_over_the_recorded_ids_are_those_of_the_sampler(world, name, layout, how):
    for result in world:
        found = result[name]["truncated"][layout][how]
        assert found["exact"] < TOLERANCE and found["own"] == 1.0
        assert found["agreement"].max < TOLERANCE and found["agreement"].kept.overflow == 0.0
        assert found["agreement"].kept.ids == pytest.approx(sum(found["counts"]) / len(found["counts"]))
        assert found["without"] > 0.1, "over the whole vocabulary they are others"
        assert how == "megatron" or found["others"] < 0.9, "the ids of another token are others"


@pytest.mark.parametrize("name, layout", TRUNCATED_PUSHES)
def test_top_k_leaves_k_ids_and_top_p_fewer(world, name, layout):
    for result in world:
        found = result[name]["truncated"][layout]
        assert set(found["top_k"]["counts"]) == {5}
        assert max(found["vllm"]["counts"]) <= 5 and min(found["vllm"]["counts"]) < 5
        drawn, stopped, worded = found["lengths"]
        assert sum(stopped) < sum(drawn) and sum(worded) < sum(drawn) and len(found["stopped"]["counts"]) == sum(stopped)
        assert found["greedy"] == [None] * len(drawn), "an evaluation records nothing"


@pytest.mark.parametrize("how", ["vllm", "megatron"])
def test_ids_that_tie_with_the_kth_best_are_recorded(world, how):
    for result in world:
        found = result[TIED]["ties"]["twins"][how]
        # the last of 131 ids has no twin
        assert 6 in found["counts"] and set(found["counts"]) <= {5, 6} and found["own"] == 1.0
        assert found["exact"] < TOLERANCE and found["agreement"].kept.overflow == 0.0


@pytest.mark.parametrize("how", ["vllm", "megatron"])
def test_more_ties_than_can_be_recorded_are_counted_and_show_in_the_agreement(world, how):
    """All 131 ids are drawn with the same probability and 21 are recorded."""
    for result in world:
        found = result[TIED]["ties"]["equal"][how]
        assert set(found["counts"]) == {truncated.TOP_K.top_k_width} == {21} and found["own"] == 1.0
        assert found["agreement"].kept.overflow == 1.0
        assert found["agreement"].mean == pytest.approx(1 / 21 - 1 / 131, rel=1e-4)
