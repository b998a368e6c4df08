"""An adapter apart from the weights: what is refused, the ranks that vLLM takes, and who sends which rectangle."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from megappo.bridge.adapter_sync import first_held
from megappo.config.checks import problems
from megappo.config.loading import explicit_keys
from megappo.config.role_sections import LoraConfig
from megappo.config.rollout_checks import MAX_VLLM_RANK
from megappo.models.pieces import Box, Piece, PieceMap
from megappo.rollout.vllm_adapter import RANKS, adapter_options
from tests.config.examples import train_config

LORA = ["policy.engine=fsdp2", "policy.lora.rank=4"]
REFUSED = [
    (["rollout.adapter=separate"], 'rollout.adapter = "separate": has no effect: policy.lora is not set'),
    (
        [*LORA, "rollout.engine=megatron", "rollout.adapter=separate"],
        'rollout.adapter = "separate": has no effect: rollout.engine is megatron',
    ),
    (
        [*LORA, "rollout.adapter=separate", "policy.lora.rank=513"],
        "policy.lora.rank = 513: vLLM applies adapters up to rank 512; lower it, or set rollout.adapter to merged",
    ),
    ([*LORA, "rollout.adapter=separate", "rollout.sleep=all"], 'rollout.sleep = "all": vLLM would lose the frozen weights'),
]


@pytest.mark.parametrize("overrides, words", REFUSED)
def test_what_cannot_be_pushed_apart_is_refused(tmp_path, overrides: list[str], words: str) -> None:
    config = train_config(tmp_path, overrides)
    assert any(words in message for message in problems(config, explicit_keys(config), 1))


def test_it_may_be_pushed_apart(tmp_path) -> None:
    config = train_config(tmp_path, [*LORA, "rollout.adapter=separate", "rollout.sleep=cache"])
    assert list(problems(config, explicit_keys(config), 1)) == []


@pytest.mark.parametrize("rank, room", [(1, 1), (3, 8), (16, 16), (17, 32), (512, 512)])
def test_vllm_makes_room_for_the_next_rank_that_it_knows(rank: int, room: int) -> None:
    assert adapter_options(LoraConfig(rank=rank))["max_lora_rank"] == room


def test_the_ranks_are_vllms() -> None:
    lora: Any = pytest.importorskip("vllm.config.lora")
    assert get_args(lora.MaxLoRARanks) == RANKS and max(RANKS) == MAX_VLLM_RANK


def test_every_rectangle_is_sent_once() -> None:
    shared, upper, lower = (Piece("a", Box(*box), "p", 0, 0) for box in ((0, 2, 0, 4), (2, 3, 0, 4), (3, 5, 0, 4)))
    pieces = PieceMap.of({0: [shared], 1: [shared, upper], 2: [upper, lower]})
    sent = [first_held(pieces, position) for position in range(3)]
    assert sent == [(shared,), (upper,), (lower,)]
