"""Refusals that need neither vLLM nor a world."""

from __future__ import annotations

import importlib.util
import re

import pytest

from megappo.models.arch import Delta, MoeArch, Rope
from megappo.rollout.vllm_limits import check_vllm
from megappo.rollout.vllm_process import require_vllm
from tests.bridge.engines import arch_like

MOE = dict(family="qwen3_moe", hidden_size=64, moe=MoeArch(8, 2, 30, True))
GOOD = dict(family="llama", head_dim=32, num_heads=4, num_kv_heads=2, ffn_size=24, max_positions=256)


@pytest.mark.parametrize(
    "changes, length, message",
    [
        ({"head_dim": 24}, 256, "head_dim 24"),
        ({"sliding_window": 8, "sliding_layers": (False, True)}, 256, "no sliding attention in some layers only"),
        ({**MOE, "hidden_size": 48}, 256, "experts in blocks of 32 and the model's hidden_size is 48"),
        (
            {"delta": Delta(2, 4, 128, 64, 4, (True, False), True)},
            256,
            "keys and values have 128 and 64; set rollout.engine: megatron",
        ),
        ({}, 257, "may take 257 tokens, but the model has 256 positions"),
        ({"rope": Rope(type="yarn", factor=2.0, original_max_positions=64)}, 129, "the model has 128 positions"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_in_one_line(changes, length, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        check_vllm(arch_like(**{**GOOD, **changes}), length, "cpu")
    assert "\n" not in str(error.value)


def test_delta_nets_are_sampled_in_bf16_on_a_cpu():
    arch = arch_like(**GOOD, delta=Delta(2, 4, 128, 128, 4, (True, False), True))
    with pytest.raises(ValueError, match="delta nets in bf16 alone, and policy.dtype is fp32; set policy.dtype: bf16, or"):
        check_vllm(arch, 256, "cpu", in_fp32=True)
    check_vllm(arch, 256, "cpu")
    check_vllm(arch, 256, "cuda", in_fp32=True)


@pytest.mark.parametrize(
    "changes, length, device",
    [
        ({}, 256, "cpu"),
        ({}, 1, "cpu"),
        ({"head_dim": 24}, 256, "cuda"),
        ({**MOE}, 256, "cpu"),
        ({**MOE, "hidden_size": 48}, 256, "cuda"),
        ({"sliding_window": 8, "sliding_layers": (True, True)}, 256, "cpu"),
        ({"family": "gemma3_text", "sliding_window": 8, "sliding_layers": (True, False)}, 256, "cpu"),
        ({"rope": Rope(type="yarn", factor=4.0, original_max_positions=64)}, 256, "cpu"),
    ],
)
def test_what_it_can_serve_passes(changes, length, device):
    check_vllm(arch_like(**{**GOOD, **changes}), length, device)


def test_a_missing_vllm_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"vllm is not installed; pip install .*rollout.engine: megatron"):
        require_vllm()
