"""A checkpoint of one engine loads under the other, weights and optimizer, and the run goes on with the same numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checkpoint.between_engines import (
    ADAPTERS,
    CHAINS_OF_DELTA_NETS,
    EXPERTS,
    EXPERTS_GO_ON,
    GOES_ON,
    MODELS,
    SPOILS,
    TOWER,
    world_main,
)
from tests.models.checkpoints import write_checkpoint
from tests.models.vision_cases import write_vision_checkpoint
from tests.worlds import spawn_world

TOLERANCE = 1e-5
KINDS = {"loss", "grad_norm", "lr", "weight", "exp_avg", "exp_avg_sq", "step"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("engines")
    for checkpoint in {checkpoint for checkpoint, _ in (*MODELS.values(), *EXPERTS.values())}:
        write_checkpoint(folder / checkpoint, checkpoint)
    for checkpoint, _ in TOWER.values():
        write_vision_checkpoint(folder / checkpoint, checkpoint)
    write_checkpoint(folder / "qwen3 wide", "qwen3", intermediate_size=128)
    return spawn_world(world_main, 2, str(folder))


@pytest.mark.parametrize("model", ["policy", "policy tied", "bf16", *EXPERTS, *TOWER])
def test_weights_and_optimizer_survive_a_chain_of_engines(ranks, model: str) -> None:
    """Every weight, moment and main parameter, and the step, after every hop, to the bit."""
    for rank in ranks:
        found = rank[f"chain {model}"]
        assert found["wrong"] == []
        in_bf16 = model in ("bf16", "experts", *CHAINS_OF_DELTA_NETS)
        kinds = {"weight", "exp_avg", "exp_avg_sq", "step"} | ({"main"} if in_bf16 else set())
        assert {part.split()[0] for part in found["parts"]} == kinds


@pytest.mark.parametrize(
    "model, writer, reader",
    [(model, *way) for model, ways in GOES_ON.items() for way in ways] + [("experts", *way) for way in EXPERTS_GO_ON],
)
def test_a_run_goes_on_under_the_other_engine(ranks, model: str, writer: str, reader: str) -> None:
    """Losses, gradients, schedule, then weights and moments, of two more updates, beside the run that keeps its engine."""
    for rank in ranks:
        found = rank[f"{model}: {writer} to {reader}"]
        # Megatron's dense weights of ep 2 are of dp 2.
        assert found.keys() - {"gradient"} == KINDS and ("gradient" in found or "dp2" in writer or "ep2" in writer)
        assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("model", ADAPTERS)
@pytest.mark.parametrize("way", [0, 1, 2], ids=["to fsdp2", "to megatron", "to another layout of fsdp2"])
def test_adapters_go_on_under_the_other_engine(ranks, model: str, way: int) -> None:
    """Losses after two more updates, which moments and position decide."""
    for rank in ranks:
        found = rank[f"{model} {way}"]
        assert found.keys() == {"loss", "grad_norm", "lr"} and max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("mistake", SPOILS)
def test_what_lands_in_the_wrong_place_is_noticed(ranks, mistake: str) -> None:
    for rank in ranks:
        assert max(rank[mistake].values()) > 100 * TOLERANCE


def test_a_critic_starts_from_another_engines_policy_or_critic(ranks) -> None:
    for rank in ranks:
        found = rank["from checkpoint"]
        assert found["critic"] == [] and not found["critic head is its own"]
        assert found["policy"] == ["weight lm_head.weight", "weight score.weight"], "each has one of the two"
        assert found["policy head is its own"]


def test_what_does_not_fit_is_refused_in_one_line(ranks) -> None:
    for rank in ranks:
        refused = rank["from checkpoint"]["refused"]
        assert "only the model has score.weight (1 such tensors)" in refused["head"]
        assert "only the checkpoint has model.layers.0.self_attn.k_norm.weight" in refused["other model"]
        assert "has the shape [96, 64] there and [128, 64] here" in refused["other sizes"]
        assert "only the model has lm_head.weight" in refused["value model"]
        for text in refused.values():
            assert "does not fit the model" in text and "\n" not in text


def test_a_rank_reads_its_own_part_of_the_files_alone(ranks) -> None:
    for rank in ranks:
        assert rank["bytes"]["read"] == rank["bytes"]["own"]
