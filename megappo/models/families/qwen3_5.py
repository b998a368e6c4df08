"""Qwen3.5, dense and with experts: Qwen3-Next's layers, with projections of a delta net that are tensors of their own. Its language
model, text-only or beside a vision tower."""

from __future__ import annotations

from dataclasses import replace

from megappo.models.arch import ModelArch
from megappo.models.families.qwen3_next import with_delta_nets
from megappo.models.family import Composite, Experts, Family, NotImplementedByFamilies, Values, read_moe
from megappo.models.weight_rules import DELTA_NET, GATED_SHARED_EXPERT, HEAD_NORMS, PRE_NORM_LAYER, ROUTER, Rows

_DELTA = (
    Rows(
        "self_attention.in_proj.weight",
        (
            ("linear_attn.in_proj_qkv.weight", ("delta keys", "delta keys", "delta values")),
            ("linear_attn.in_proj_z.weight", ("delta values",)),
            ("linear_attn.in_proj_b.weight", ("delta heads",)),
            ("linear_attn.in_proj_a.weight", ("delta heads",)),
        ),
    ),
    *DELTA_NET,
)


def _details(values: Values, arch: ModelArch) -> ModelArch:
    if not values.get("attn_output_gate", True):
        raise NotImplementedByFamilies(f"attn_output_gate false is not supported by megappo's layers of {arch.family}")
    return with_delta_nets(values, arch, by_key_head=False)


def _sparse_details(values: Values, arch: ModelArch) -> ModelArch:
    # transformers reads no norm_topk_prob.
    shared = values.positive("shared_expert_intermediate_size")
    return replace(_details(values, arch), moe=read_moe(values, norm_topk_prob=True, shared_size=shared, shared_gate=True))


QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5",
    PRE_NORM_LAYER + HEAD_NORMS,
    head_dim=256,
    num_kv_heads=4,
    partial_rotary=0.25,
    further_layers="mtp.",
    classifier_stem="Qwen3_5Text",
    composite=Composite("Qwen3_5ForConditionalGeneration", model_type="qwen3_5_text"),
    delta=_DELTA,
    details=_details,
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5Moe",
    PRE_NORM_LAYER + HEAD_NORMS,
    head_dim=256,
    num_kv_heads=2,
    partial_rotary=0.25,
    further_layers="mtp.",
    composite=Composite("Qwen3_5MoeForConditionalGeneration", model_type="qwen3_5_moe_text"),
    experts=Experts(ROUTER, beside=GATED_SHARED_EXPERT),
    delta=_DELTA,
    defaults={"intermediate_size": 512},  # of no layer
    details=_sparse_details,
)
