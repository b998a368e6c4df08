"""Qwen3-Next: gated delta nets in three of four layers, gated attention in the others, experts beside a gated shared one."""

from __future__ import annotations

from dataclasses import replace

from megappo.models.arch import Delta, ModelArch
from megappo.models.families.qwen3_moe import dense_layers_of
from megappo.models.family import Experts, Family, Values, read_moe
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


def _details(values: Values, arch: ModelArch) -> ModelArch:
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
    details=_details,
)
