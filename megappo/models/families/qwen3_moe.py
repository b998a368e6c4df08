"""Qwen3 with a mixture of experts in place of the MLP, in some or all layers."""

from __future__ import annotations

from megappo.models.families.qwen3 import QWEN3
from megappo.models.family import Experts, Family, Window
from megappo.models.weight_rules import Router

QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3Moe",
    QWEN3.rules,
    keys={"num_experts": "num_local_experts"},  # transformers 5 writes either
    num_kv_heads=4,
    window=Window(default=4096, switched=True),
    experts=Experts(
        router=Router("mlp.router.weight", "mlp.gate.weight"),
        gate="mlp.experts.{}.gate_proj.weight",
        up="mlp.experts.{}.up_proj.weight",
        down="mlp.experts.{}.down_proj.weight",
        dense=QWEN3.name,
    ),
)
