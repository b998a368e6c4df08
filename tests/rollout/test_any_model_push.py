"""Transformers' own classes: FSDP2 shards of a policy that trains, pushed into vLLM, whose classes hold the same architectures.

The oracle is the trainer's forward pass, as in `test_policy_push.py`.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megappo.config.role_sections import LoraConfig, ModelConfig, OptimizerConfig, PolicyConfig
from megappo.config.run_sections import TimeoutsConfig
from megappo.config.schema import AlgorithmConfig
from megappo.data.images import ImageStore
from megappo.data.packing import ROUTES, Ragged
from megappo.models.hf_config import arch_for
from megappo.parallel import cpu_patches
from megappo.parallel.layout import ParallelLayout
from megappo.trainer.experience.collect import pack_experience
from tests.engine.test_conformance import negative_logprob
from tests.engine.whole import on_whole_batches
from tests.models.any_families import write_any_checkpoint
from tests.models.checkpoints import write_checkpoint
from tests.rollout.engines import make_engine
from tests.rollout.policies import distance, make_policy, mean_distance, train_frozen, train_once
from tests.rollout.responses import generate_all
from tests.rollout.test_policy_push import GREEDY, requests
from tests.worlds import spawn_world

RANKS = 2
_YARN: dict[str, Any] = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0
)
TOLERANCE = 1e-4  # fp32; weights of before the update differ by more than 0.1
# model type -> changes of its config. Sliding and full attention in turn with norms around each block; experts by slots; a
# correction that two of vLLM's modules hold; latent attention, of which vLLM derives what it multiplies with; experts that vLLM
# holds transposed, with biases that one rank of a replica adds.
CASES: dict[str, dict[str, Any]] = {
    "gemma3_text": dict(head_dim=32, query_pre_attn_scalar=32),
    "mixtral": dict(head_dim=32, num_local_experts=6),
    "glm4_moe": dict(head_dim=32, n_routed_experts=8),
    "deepseek_v3": dict(
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        q_lora_rank=48,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=48,
        head_dim=64,
        rope_parameters=dict(_YARN, mscale=1.0, mscale_all_dim=1.0),
    ),
    "gpt_oss": dict(head_dim=32, intermediate_size=128, num_local_experts=8, rope_parameters=dict(_YARN, truncate=False)),
}
TENSOR_PARALLEL = ("glm4_moe", "deepseek_v3", "gpt_oss", "qwen3_next")  # in vLLM
_SP: dict[str, Any] = dict(tp=2, sequence_parallel=True)
ON_MEGATRON: dict[str, dict[str, Any]] = {  # families, whose ranks on Megatron have a parameter for each expert
    "mixtral": dict(**_SP, etp=2),
    "glm4_moe": dict(pp=2),
    "deepseek_v3": dict(**_SP, ep=2),
    "gpt_oss": dict(ep=2),
}

ADAPTED = ("gemma3_text", "mixtral", "gpt_oss")  # all experts too
_DELTA = dict(head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128)
DELTA_NETS: dict[str, dict[str, Any]] = {  # vLLM on a CPU in bf16
    "qwen3_next": dict(**_DELTA, moe_intermediate_size=64),
    "qwen3_5_moe": dict(**_DELTA, moe_intermediate_size=64),  # of whose projections vLLM fuses other ones
}

# Parts that a family alone has, or under a name of its own; on Megatron, where all of vLLM's weights change in the first push.
FROZEN: dict[str, tuple[str, ...]] = {
    "mixtral": ("block_sparse_moe.experts",),
    "glm4_moe": ("shared_experts", "mlp.gate", "layers.0.mlp"),
    "deepseek_v3": ("kv_b_proj", "kv_a_layernorm", "q_b_proj"),
    "gpt_oss": ("sinks", "router"),
    "qwen3_next": ("linear_attn.norm", "shared_expert_gate"),
    "qwen3_5_moe": ("linear_attn.norm", "shared_expert_gate"),
}


def run_case(path: str) -> dict[str, Any]:
    policy = sharded_policy(path)
    with contextlib.closing(make_engine(path, 2 if Path(path).name in TENSOR_PARALLEL else 1, arch=policy.engine.arch)) as engine:
        engine.connect(policy.engine)
        found: dict[str, Any] = {"pushes": []}
        responses = None
        for version in (1, 2):
            if responses is not None:
                train_once(policy)
                found["stale"] = distance(policy, requests(), responses)
            metrics = engine.push_weights(version)
            responses = generate_all(engine, requests(), GREEDY)
            found["pushes"].append((distance(policy, requests(), responses), metrics))
        if policy.engine.arch.moe is not None:
            found["routes"] = routes_of_sampler(policy, responses)
            found["no routes"] = without_routes(engine)
        if Path(path).name == "deepseek_v3":
            found["absorbed"] = with_old_absorbed_weights(engine, policy)
        if Path(path).name in ON_MEGATRON:
            freeze = FROZEN[Path(path).name]
            policy = make_policy(path, ParallelLayout(RANKS, **ON_MEGATRON[Path(path).name]), freeze=freeze)
            engine.connect(policy.engine)
            found["megatron"] = []
            for version in (3, 4):
                verified = engine.push_weights(version)["verified"]
                responses = generate_all(engine, requests(), GREEDY)
                far = distance(policy, requests(), responses)
                found["routes on Megatron"] = routes_of_sampler(policy, responses)
                found["frozen"] = train_frozen(policy, freeze)
                found["megatron"].append((far, verified, distance(policy, requests(), responses)))
        if Path(path).name in ADAPTED:
            lora, where = LoraConfig(rank=4, alpha=32.0), ON_MEGATRON.get(Path(path).name)
            adapted = make_policy(path, ParallelLayout(RANKS, **where), lora=lora) if where else sharded_policy(path, lora)
            train_once(adapted)
            engine.connect(adapted.engine)
            metrics = engine.push_weights(3)
            responses = generate_all(engine, requests(), GREEDY)
            found["adapted"] = distance(adapted, requests(), responses), metrics["verified"]
            with adapted.engine.adapters.off():
                found["unmerged"] = distance(adapted, requests(), responses)
    return found


def run_delta_nets(path: str) -> dict[str, Any]:
    """(distance, 1.0 if checksums agree, distance after an update) of two pushes; with the mean of tokens, not the largest."""
    freeze = FROZEN[Path(path).name]
    policy = make_policy(path, ParallelLayout(RANKS, **_SP), freeze=freeze)
    found: dict[str, Any] = {"megatron": []}
    tp = 2 if Path(path).name in TENSOR_PARALLEL else 1
    with contextlib.closing(make_engine(path, tp, arch=policy.engine.arch, dtype=torch.bfloat16)) as engine:
        engine.connect(policy.engine)
        for version in (1, 2):
            verified = engine.push_weights(version)["verified"]
            responses = generate_all(engine, requests(), GREEDY)
            far = mean_distance(policy, requests(), responses)
            found["frozen"] = train_frozen(policy, freeze)
            found["megatron"].append((far, verified, mean_distance(policy, requests(), responses)))
    return found


def routes_of_sampler(policy: Any, responses: list) -> dict[str, Any]:
    """The trainer's pass with the experts that vLLM recorded, and with those of the next token."""
    asked, moe = requests(), policy.engine.arch.moe
    batch = pack_experience(asked, responses, num_experts=moe.num_experts)
    rows = batch.ragged(ROUTES)
    width = int(rows.counts.max())
    ids = rows.ids.view(-1, width).roll(1, 0).flatten()
    shifted = batch.with_fields(ragged_fields={ROUTES: Ragged(ids, rows.counts)})
    how = dict(reads=("weight", ROUTES), forward_only=True)
    sums = []
    with policy.engine.eval_mode():
        for one in (batch, shifted):
            one = one.with_fields({"weight": torch.zeros(one.num_tokens)})
            sums.append(policy.engine.forward_backward(one, negative_logprob, **how).sums)
    missing = [int((part == 0).sum()) for part in rows.counts.split(batch.lengths.tolist())]
    return {"sums": sums, "missing": missing, "layers": width // moe.top_k}


def without_routes(engine: Any) -> list[str]:
    """Messages about a finished response of which no step recorded experts, by the tap and by vLLM's own option."""
    one: Any = SimpleNamespace(internal="unknown", request=SimpleNamespace(number=7))
    found = []
    for tap in (engine._tap, None):
        with mock.patch.object(engine, "_tap", tap), pytest.raises(RuntimeError) as raised:
            engine._routes_of(one, SimpleNamespace(routed_experts=None))
        found.append(str(raised.value))
    return found


def with_old_absorbed_weights(engine: Any, policy: Any) -> float:
    """Distance after weights change and a push that leaves what vLLM derives of them as it was."""
    model = engine._llm.llm_engine.model_executor.driver_worker.worker.get_model()
    derived = [one for name, one in model.named_parameters() if name.endswith(("W_UK_T", "W_UV"))]
    assert len(derived) == 2 * policy.engine.arch.num_layers
    old = [one.clone() for one in derived]
    train_once(policy)
    engine.push_weights(3)
    with torch.inference_mode():
        for one, values in zip(derived, old):
            one.copy_(values)
    return distance(policy, requests(), generate_all(engine, requests(), GREEDY))


def sharded_policy(path: str, lora: LoraConfig | None = None, images: ImageStore | None = None) -> Any:
    from megappo.engine.build import RoleEngines
    from megappo.engine.factory import EngineSpec
    from megappo.trainer.roles import Policy

    optimizer = OptimizerConfig(lr=1e-2, eps=1e-5)
    section = PolicyConfig(model=path, engine="fsdp2", dtype="fp32", micro_batch_tokens=256, optimizer=optimizer, lora=lora)
    spec = EngineSpec("policy", path, arch_for(path, "fsdp2"), section, total_updates=10, images=images)
    engines = RoleEngines(ModelConfig(impl="local"), TimeoutsConfig(), torch.device("cpu"))
    return on_whole_batches(Policy(engines.build(spec), 1.0, AlgorithmConfig()))  # type: ignore[arg-type]


def in_world(rank: int, folder: str, kinds: tuple[str, ...]) -> dict[str, Any]:
    cpu_patches.install()
    found: dict[str, Any] = {kind: run_case(str(Path(folder, kind))) for kind in kinds}
    return found | {kind: run_delta_nets(str(Path(folder, kind))) for kind in DELTA_NETS}


def write(folder: Path, kind: str, changes: dict[str, Any]) -> None:
    write_any_checkpoint(folder, kind, **changes)
    if kind == "deepseek_v3":  # as published; transformers' config drops the keys that tell vLLM of the correction
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("any")
    for kind, changes in CASES.items():
        write(folder / kind, kind, changes)
    for kind, changes in DELTA_NETS.items():
        write_checkpoint(folder / kind, kind, **changes)
    return spawn_world(in_world, RANKS, str(folder), tuple(CASES))


@pytest.mark.parametrize("kind", CASES)
def test_the_engine_samples_from_the_model_that_is_trained(world, kind: str) -> None:
    for found in world:
        assert all(far < TOLERANCE and metrics["verified"] == 1.0 for far, metrics in found[kind]["pushes"])
        assert found[kind]["stale"] > 0.1, "the comparison would notice weights of before the update"


@pytest.mark.parametrize("kind", ON_MEGATRON)
def test_the_engine_samples_from_a_family_on_megatron_before_and_after_an_update(world, kind: str) -> None:
    for found in world:
        assert all(far < TOLERANCE and verified == 1.0 and stale > 0.1 for far, verified, stale in found[kind]["megatron"])


@pytest.mark.parametrize("kind", DELTA_NETS)
def test_the_engine_samples_from_delta_nets_before_and_after_an_update(world, kind: str) -> None:
    """Checksums are exact; numbers are those of bf16, means over the tokens: 6e-3, with old weights 0.3."""
    for found in world:
        pushes = found[kind]["megatron"]
        assert all(far < 0.03 and verified == 1.0 and stale > 0.1 for far, verified, stale in pushes), pushes


@pytest.mark.parametrize("kind", FROZEN)
def test_frozen_parts_of_a_family_stay_while_the_rest_trains(world, kind: str) -> None:
    """That the rest trains is the distance after an update, above."""
    frozen, moved = (set().union(*(found[kind]["frozen"][which] for found in world)) for which in (0, 1))
    assert frozen and not moved


def test_a_stale_derived_weight_of_latent_attention_is_noticed(world) -> None:
    assert all(found["deepseek_v3"]["absorbed"] > 100 * TOLERANCE for found in world)


def test_the_experts_that_vllm_records_are_those_of_the_trainer(world) -> None:
    """In fp32 both choose alike. The last token of a response is read by nobody, and a cached prefix is not computed."""
    for kind in CASES:
        for found in world:
            for engine in ("routes", "routes on Megatron"):
                if (routes := found[kind].get(engine)) is not None:
                    own, shifted = routes["sums"]
                    assert own["rerouted_sum"] == 0.0 < shifted["rerouted_sum"], kind
                    assert min(routes["missing"]) == 1 and own["routes_sum"] > 0, kind


def test_a_response_without_its_experts_is_named_with_the_way_out(world) -> None:
    for rank, found in enumerate(world):
        message = f"vLLM recorded no experts of sample 7 on rank {rank}; set rollout.replay_experts=none"
        assert found["mixtral"]["no routes"] == [f"rollout.replay_experts: {message}"] * 2


@pytest.mark.parametrize("kind", ADAPTED)
def test_the_engine_samples_from_base_and_adapter(world, kind: str) -> None:
    for found in world:
        far, verified = found[kind]["adapted"]
        assert far < TOLERANCE and verified == 1.0
        assert found[kind]["unmerged"] > 0.01, "an unmerged push would be seen"


@pytest.mark.parametrize("kind", CASES)
def test_every_byte_is_accounted_for(world, kind: str) -> None:
    for push in range(2):
        metrics = [found[kind]["pushes"][push][1] for found in world]
        assert sum(m["bytes_sent"] for m in metrics) == sum(m["bytes_received"] for m in metrics)
