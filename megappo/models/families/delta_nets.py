"""Families with gated delta nets in three of four layers and gated attention in the others: Qwen3-Next, with experts beside a gated
shared one, and Qwen3.5, dense and with experts, text-only or beside a vision tower, whose projections are tensors of their own."""

from __future__ import annotations

from dataclasses import replace

from megappo.models.arch import Delta, ModelArch
from megappo.models.families.softmax_experts import dense_layers_of
from megappo.models.family import Composite, Experts, Family, NotImplementedByFamilies, Values, read_moe
from megappo.models.weight_rules import DELTA_NET, GATED_SHARED_EXPERT, HEAD_NORMS, PRE_NORM_LAYER, ROUTER, Rows

_LINEAR, _FULL = "linear_attention", "full_attention"
_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""Keys of a delta net and transformers' defaults."""


def with_delta_nets(values: Values, arch: ModelArch, *, by_key_head: bool) -> ModelArch:
    """Read which layers have delta nets, and their sizes. ValueError, one line, for values that contradict each other."""
    every = values.positive_or("full_attention_interval", 4, 4)
    default = [_FULL if (layer + 1) % every == 0 else _LINEAR for layer in range(arch.num_layers)]
    kinds = values.get("layer_types") or default
    if unknown := sorted({*kinds} - {_LINEAR, _FULL}):
        raise ValueError(f"layer_types has {unknown[0]!r}, which is not supported; supported are {_FULL} and {_LINEAR}")
    if len(kinds) != arch.num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for num_hidden_layers {arch.num_layers}")
    key_heads, value_heads, *others = (values.positive_or(key, default, default) for key, default in _SIZES.items())
    if value_heads % key_heads:
        raise ValueError(f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}")
    delta = Delta(key_heads, value_heads, *others, layers=tuple(kind == _LINEAR for kind in kinds), by_key_head=by_key_head)
    return replace(arch, delta=delta if any(delta.layers) else None, output_gate=True, centred_norms=True)


def _qwen3_next(values: Values, arch: ModelArch) -> ModelArch:
    norm_topk_prob, shared = bool(values.get("norm_topk_prob", True)), values.positive("shared_expert_intermediate_size")
    dense = dense_layers_of(values, arch.num_layers)
    moe = read_moe(values, dense_layers=dense, norm_topk_prob=norm_topk_prob, shared_size=shared, shared_gate=True)
    return with_delta_nets(values, replace(arch, moe=moe), by_key_head=True)


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3Next",
    PRE_NORM_LAYER + HEAD_NORMS,
    head_dim=256,
    num_kv_heads=2,
    partial_rotary=0.25,
    further_layers="mtp.",
    experts=Experts(ROUTER, beside=GATED_SHARED_EXPERT),
    delta=(
        Rows(
            "self_attention.in_proj.weight",
            (("linear_attn.in_proj_qkvz.weight", ("delta qkvz",)), ("linear_attn.in_proj_ba.weight", ("delta ba",))),
        ),
        *DELTA_NET,
    ),
    details=_qwen3_next,
)


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


def _qwen3_5(values: Values, arch: ModelArch) -> ModelArch:
    if not values.get("attn_output_gate", True):
        raise NotImplementedByFamilies(f"attn_output_gate false is not supported by megappo's layers of {arch.family}")
    return with_delta_nets(values, arch, by_key_head=False)


def _qwen3_5_moe(values: Values, arch: ModelArch) -> ModelArch:
    # transformers reads no norm_topk_prob.
    shared = values.positive("shared_expert_intermediate_size")
    return replace(_qwen3_5(values, arch), moe=read_moe(values, norm_topk_prob=True, shared_size=shared, shared_gate=True))


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
    details=_qwen3_5,
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
    details=_qwen3_5_moe,
)
