"""DeepSeek-V3 and R1, Kimi K2: latent attention, and experts by sigmoid scores with a correction beside shared ones."""

from __future__ import annotations

import math
from dataclasses import replace

from megappo.models.arch import LATENT_EPS, Latent, ModelArch, MoeArch
from megappo.models.family import Experts, Family, NotImplementedByFamilies, Values, read_moe
from megappo.models.weight_rules import CORRECTION, LATENT_LAYER, ROUTER, SHARED_EXPERTS

CORRECTED_EXPERTS = Experts(ROUTER, beside=(CORRECTION, *SHARED_EXPERTS))
_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


def corrected_moe(values: Values) -> MoeArch:
    """Read the keys of `CORRECTED_EXPERTS`. ValueError, one line, for a router of another kind."""
    for key, only in _ROUTER.items():
        if (found := values.get(key, only)) != only:
            reason = f"transformers' class computes {only!r} whatever the file says, so no engine runs it"
            raise ValueError(f"{key} {found!r} is not supported: {reason}")
    first, num_layers = values.get("first_k_dense_replace", 0), values.positive("num_hidden_layers")
    if first >= num_layers:
        raise ValueError(f"first_k_dense_replace {first} leaves no layer with experts; use fewer than the {num_layers} layers")
    groups, top_groups = values.positive_or("n_group", None, 1), values.positive_or("topk_group", None, 1)
    size = values.positive("moe_intermediate_size") * values.positive_or("n_shared_experts", None, 1)
    scaling = values.number("routed_scaling_factor", 1.0)
    moe = read_moe(values, dense_layers=tuple(range(first)), sigmoid=True, scaling=scaling, shared_size=size)
    of_group, rest = divmod(moe.num_experts, groups)
    if rest or top_groups > groups or top_groups * of_group < moe.top_k or (groups > 1 and of_group < 2):
        fix = "n_group has to divide them in groups of two or more, and topk_group groups have to hold the chosen ones"
        raise ValueError(f"{moe.top_k} of {moe.num_experts} experts with n_group {groups} and topk_group {top_groups}: {fix}")
    return replace(moe, groups=groups, top_groups=top_groups)


def _details(values: Values, arch: ModelArch) -> ModelArch:
    if (interleaved := values.get("rope_interleave", True)) is not True:
        raise NotImplementedByFamilies(f"rope_interleave {interleaved!r} is not supported; only True is")
    if (eps := values.get("rms_norm_eps", LATENT_EPS)) != LATENT_EPS:
        readings = f"transformers gives the norms of latents {LATENT_EPS}, vLLM the file's: only rollout.engine=megatron agrees"
        raise NotImplementedByFamilies(f"rms_norm_eps {eps!r} is not supported ({readings})")
    if (chosen := values.get("index_topk")) is not None:
        readings = "vLLM's class has sparse attention by this key, transformers' has none"
        raise ValueError(f"index_topk {chosen} is not supported: {readings}; use DeepSeek-V3 or R1, whose attention is dense")
    q_rank = values.get("q_lora_rank")
    sizes = [values.positive(key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    latent = Latent(None if q_rank is None else values.positive("q_lora_rank"), *sizes)
    rope = arch.rope
    scale = (latent.nope + latent.rope) ** -0.5
    if rope.mscale_all_dim and rope.factor and rope.factor > 1:  # YaRN's, squared: of queries and of keys
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return replace(
        arch,
        latent=latent,
        head_dim=latent.value,
        num_kv_heads=arch.num_heads,
        qk_norm=False,
        softmax_scale=scale,
        rope=replace(rope, channels=latent.rope),
        moe=corrected_moe(values),
    )


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3",
    LATENT_LAYER,
    keys={"num_experts": "n_routed_experts"},
    experts=CORRECTED_EXPERTS,
    details=_details,
)
