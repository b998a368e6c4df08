"""Refusals that need neither vLLM nor a world."""

from __future__ import annotations

import importlib.util
import re

import pytest

from megappo.models.arch import MoeArch, Rope
from megappo.rollout.vllm_limits import check_vllm
from megappo.rollout.vllm_process import require_vllm
from tests.bridge.engines import arch_like

MOE = dict(family="qwen3_moe", hidden_size=64, moe=MoeArch(8, 2, 30, True))
GOOD = dict(family="llama", head_dim=32, num_heads=4, num_kv_heads=2, ffn_size=24, max_positions=256)


@pytest.mark.parametrize(
    "changes, tp, world, length, message",
    [
        ({}, 3, 4, 256, "rollout.tp: 3 does not divide the 4 ranks"),
        ({"num_heads": 6}, 4, 4, 256, "rollout.tp: 4 does not divide the 6 attention heads"),
        ({"ffn_size": 30}, 4, 4, 256, "rollout.tp: 4 does not divide the 30 MLP columns"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, 4, 256, "rollout.tp: 2 neither divides the 3 KV heads"),
        ({"head_dim": 24}, 1, 4, 256, "head_dim 24"),
        ({"sliding_window": 8, "sliding_layers": (False, True)}, 1, 4, 256, "no sliding attention in some layers only"),
        ({**MOE}, 4, 4, 256, "rollout.tp: 4 does not divide the 30 columns of an expert"),
        ({**MOE, "hidden_size": 48}, 1, 4, 256, "experts in blocks of 32 and the model's hidden_size is 48"),
        ({}, 1, 4, 257, "may take 257 tokens, but the model has 256 positions"),
        ({"rope": Rope(type="yarn", factor=2.0, original_max_positions=64)}, 1, 4, 129, "the model has 128 positions"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_in_one_line(changes, tp, world, length, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        check_vllm(arch_like(**{**GOOD, **changes}), tp, world, length, "cpu")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes, tp, length, device",
    [
        ({}, 4, 256, "cpu"),  # KV heads replicated
        ({}, 2, 1, "cpu"),
        ({"head_dim": 24}, 1, 256, "cuda"),
        ({**MOE, "ffn_size": 25}, 2, 256, "cpu"),  # no layer has a dense MLP
        ({**MOE, "hidden_size": 48}, 1, 256, "cuda"),
        ({"sliding_window": 8, "sliding_layers": (True, True)}, 1, 256, "cpu"),
        ({"rope": Rope(type="yarn", factor=4.0, original_max_positions=64)}, 1, 256, "cpu"),
    ],
)
def test_what_it_can_serve_passes(changes, tp, length, device):
    check_vllm(arch_like(**{**GOOD, **changes}), tp, 4, length, device)


def test_a_missing_vllm_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"vllm is not installed; pip install .*rollout.engine: megatron"):
        require_vllm()
