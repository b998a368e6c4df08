"""Qwen3 with a mixture of experts in place of the MLP, in some or all layers."""

from __future__ import annotations

from dataclasses import replace

from megappo.models.arch import ModelArch
from megappo.models.families.qwen3 import QWEN3
from megappo.models.family import Experts, Family, Values, Window, read_moe
from megappo.models.weight_rules import ROUTER


def dense_layers_of(values: Values, num_layers: int) -> tuple[int, ...]:
    """Numbers of the layers without experts. ValueError if no other is left."""
    step, listed = values.get("decoder_sparse_step") or 1, values.get("mlp_only_layers") or []
    dense = tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)
    if len(dense) == num_layers:
        fix = f"use the {QWEN3.name} architecture"
        raise ValueError(f"decoder_sparse_step and mlp_only_layers leave no layer with experts; {fix}")
    return dense


def _details(values: Values, arch: ModelArch) -> ModelArch:
    return replace(arch, moe=read_moe(values, dense_layers=dense_layers_of(values, arch.num_layers)))


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3Moe",
    QWEN3.rules,
    keys={"num_experts": "num_local_experts"},  # transformers 5 writes either
    num_kv_heads=4,
    window=Window(default=4096, switched=True),
    experts=Experts(ROUTER),
    details=_details,
)
