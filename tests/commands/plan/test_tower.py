"""Memory of vision towers: bytes for each patch against those alive in real towers, and how a stage adds them up."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.commands.plan import estimate
from megappo.commands.plan.activations import RoleWork
from megappo.commands.plan.estimate import feature_bytes
from megappo.commands.plan.memory import role_memory
from megappo.commands.plan.tower import kept_bytes, working_bytes
from megappo.config.loading import load_config
from megappo.models.hf_config import read_arch
from megappo.models.vision import one_pass, tower_of
from megappo.parallel.layout import ParallelLayout
from tests.commands.plan.live import Live
from tests.models.vision_cases import TOWERS, images_of, vision_arch, write_questions, write_vision_checkpoint

TOWER = dict(depth=6, hidden_size=256, intermediate_size=512, num_heads=4, fullatt_block_indexes=[2, 5])
SIZES = dict.fromkeys(TOWERS, TOWER)
SIZES["internvl"] = dict(num_hidden_layers=6, hidden_size=256, intermediate_size=1024, num_attention_heads=4)


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("towers")
    write_questions(folder)
    for kind in SIZES:
        write_vision_checkpoint(folder / kind, kind)
    return {kind: images_of(folder / kind, folder / "questions.jsonl", folder / "cache").store for kind in SIZES}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", SIZES)
def test_a_tower_holds_what_is_planned_within_a_tenth(stores, kind: str, dtype: torch.dtype) -> None:
    vision, store = vision_arch(kind, **SIZES[kind]).vision, stores[kind]
    assert vision is not None
    tower, images = tower_of(vision, dtype), [0, 1, 2, 3] * 2
    patches = sum(rows * cols for rows, cols in map(store.grid, images))

    def peak(trains: bool) -> int:
        tower.requires_grad_(trains)
        gc.collect()
        # A frozen tower gets one image at a time in a run.
        with torch.set_grad_enabled(trains), (live := Live([*tower.parameters(), *tower.buffers()])):
            features = one_pass(tower, store, images, dtype)
        assert features[0].requires_grad == trains
        return live.peak

    planned = {True: kept_bytes(vision, dtype.itemsize), False: working_bytes(vision, dtype.itemsize)}
    for trains, of_patch in planned.items():
        assert of_patch * patches == pytest.approx(peak(trains), rel=0.1), trains
    assert planned[True] > 2 * planned[False], "negative control: one is not taken for the other"


def test_a_first_stage_keeps_the_towers_of_all_micro_batches_in_flight() -> None:
    arch, layout, patches = vision_arch("qwen3_vl", **TOWER), ParallelLayout(2, pp=2), 100
    assert arch.vision is not None

    def activations(stage: int, **changes: Any) -> tuple[int, int]:
        sizes: dict[str, Any] = dict(dtype="bf16", trained=True, micro_batch_tokens=128, num_micro_batches=8, **changes)
        memory = role_memory(arch, layout, stage, RoleWork(**sizes))
        return memory.activations, memory.forward

    seeing: dict[str, Any] = {"patches": (patches, patches)}
    late = arch.vision.deepstack * 128 * arch.hidden_size * 2  # features of later layers, in bf16
    plain = activations(0)
    trained, frozen = activations(0, tower_trains=True, **seeing), activations(0, **seeing)
    assert trained[0] - plain[0] == 2 * (patches * kept_bytes(arch.vision, 2) + late)  # two micro-batches are in flight
    assert plain[0] < frozen[0] < trained[0] and frozen[1] == trained[1] == patches * working_bytes(arch.vision, 2)
    assert activations(1, tower_trains=True, **seeing) == activations(1), "the stage behind it has no tower"


def test_features_of_frozen_towers_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the samples of a step on a rank, for every role whose tower does not train, up to the limit of a run."""
    configs = Path(__file__).parents[3] / "configs"
    arch = read_arch(configs / "models/Qwen2.5-VL-3B-Instruct")
    frozen = load_config(configs / "recipes/ppo_images.yaml")
    trained = load_config(configs / "recipes/ppo_images.yaml", ["policy.freeze=[]", "critic.freeze=[]"])
    archs, replicas = dict.fromkeys(("policy", "critic", "reference"), arch), {"policy": 4, "reference": 4}
    monkeypatch.setattr(estimate, "FEATURE_BYTES", 2**50)
    of_role = 128 * 4 // 4 * 1024 * arch.hidden_size * 2
    assert feature_bytes(frozen, archs, replicas) == 2 * of_role
    assert feature_bytes(trained, archs, replicas) == of_role
    monkeypatch.setattr(estimate, "FEATURE_BYTES", 2**30)
    assert feature_bytes(frozen, archs, replicas) == 2**30
