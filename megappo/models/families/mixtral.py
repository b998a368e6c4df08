"""Mixtral: llama's attention before experts by softmax, whose tensors have names of their own."""

from __future__ import annotations

from dataclasses import replace

from megappo.models.arch import ModelArch
from megappo.models.family import Experts, Family, NotImplementedByFamilies, Values, Window, read_moe
from megappo.models.weight_rules import PRE_NORM_LAYER, Matrix

_BLOCK = "block_sparse_moe."


def _details(values: Values, arch: ModelArch) -> ModelArch:
    if noise := values.get("router_jitter_noise"):
        raise NotImplementedByFamilies(f"router_jitter_noise {noise} is not supported; only 0.0, as in published models, is")
    return replace(arch, moe=read_moe(values, "intermediate_size", norm_topk_prob=True))


MIXTRAL = Family(
    "mixtral",
    "Mixtral",
    PRE_NORM_LAYER,
    keys={"num_experts": "num_local_experts"},
    num_kv_heads=8,
    norm_eps=1e-5,
    window=Window(),
    experts=Experts(
        Matrix("mlp.router.weight", f"{_BLOCK}gate.weight", "experts", "hidden"),
        gate=f"{_BLOCK}experts.{{}}.w1.weight",
        up=f"{_BLOCK}experts.{{}}.w3.weight",
        down=f"{_BLOCK}experts.{{}}.w2.weight",
    ),
    defaults={"rope_theta": 1e6},
    details=_details,
)
