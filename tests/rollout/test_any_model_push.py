"""Models without a family: FSDP2 shards of a policy that trains, pushed into vLLM, whose own classes hold the same architectures.

The oracle is the trainer's forward pass, as in `test_policy_push.py`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.config.role_sections import LoraConfig, ModelConfig, OptimizerConfig, PolicyConfig
from megappo.config.run_sections import TimeoutsConfig
from megappo.config.schema import AlgorithmConfig
from megappo.models.hf_config import arch_for
from megappo.parallel import cpu_patches
from tests.engine.whole import on_whole_batches
from tests.models.any_families import write_any_checkpoint
from tests.rollout.engines import make_engine
from tests.rollout.policies import distance, train_once
from tests.rollout.responses import generate_all
from tests.rollout.test_policy_push import GREEDY, requests
from tests.worlds import spawn_world

RANKS = 2
TOLERANCE = 1e-4  # fp32; weights of before the update differ by more than 0.1
# model type -> changes of its config. Sliding and full attention in turn with norms around each block; experts by slots.
CASES: dict[str, dict[str, Any]] = {
    "gemma3_text": dict(head_dim=32, query_pre_attn_scalar=32),
    "mixtral": dict(head_dim=32, num_local_experts=6),
}

ADAPTED = ("gemma3_text",)


def run_case(path: str) -> dict[str, Any]:
    policy = sharded_policy(path)
    with contextlib.closing(make_engine(path, 1, arch=policy.engine.arch)) as engine:
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
        if Path(path).name in ADAPTED:
            adapted = sharded_policy(path, LoraConfig(rank=4, alpha=32.0))
            train_once(adapted)
            engine.connect(adapted.engine)
            metrics = engine.push_weights(3)
            responses = generate_all(engine, requests(), GREEDY)
            found["adapted"] = distance(adapted, requests(), responses), metrics["verified"]
            with adapted.engine.adapters.off():
                found["unmerged"] = distance(adapted, requests(), responses)
    return found


def sharded_policy(path: str, lora: LoraConfig | None = None) -> Any:
    from megappo.engine.build import RoleEngines
    from megappo.engine.factory import EngineSpec
    from megappo.trainer.roles import Policy

    optimizer = OptimizerConfig(lr=1e-2, eps=1e-5)
    section = PolicyConfig(model=path, engine="fsdp2", dtype="fp32", micro_batch_tokens=256, optimizer=optimizer, lora=lora)
    spec = EngineSpec("policy", path, arch_for(path, "fsdp2"), section, total_updates=10)
    engines = RoleEngines(ModelConfig(impl="local"), TimeoutsConfig(), torch.device("cpu"))
    return on_whole_batches(Policy(engines.build(spec), 1.0, AlgorithmConfig()))  # type: ignore[arg-type]


def in_world(rank: int, folder: str, kinds: tuple[str, ...]) -> dict[str, Any]:
    cpu_patches.install()
    return {kind: run_case(str(Path(folder, kind))) for kind in kinds}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("any")
    for kind, changes in CASES.items():
        write_any_checkpoint(folder / kind, kind, **changes)
    return spawn_world(in_world, RANKS, str(folder), tuple(CASES), timeout_s=300)


@pytest.mark.parametrize("kind", CASES)
def test_the_engine_samples_from_the_model_that_is_trained(world, kind: str) -> None:
    for found in world:
        assert all(far < TOLERANCE and metrics["verified"] == 1.0 for far, metrics in found[kind]["pushes"])
        assert found[kind]["stale"] > 0.1, "the comparison would notice weights of before the update"


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
