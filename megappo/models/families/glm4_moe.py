"""GLM-4.5, 4.6 and 4.7: DeepSeek-V3's experts behind llama's attention, of which half of a head is rotated."""

from __future__ import annotations

from dataclasses import replace

from megappo.models.arch import ModelArch
from megappo.models.families.deepseek_v3 import CORRECTED_EXPERTS, corrected_moe
from megappo.models.family import Family, Values
from megappo.models.weight_rules import HEAD_NORMS, PRE_NORM_LAYER, QKV_BIAS


def _details(values: Values, arch: ModelArch) -> ModelArch:
    # GLM-4.5 has norms of heads, GLM-4.5-Air has none.
    qkv_bias, qk_norm = (bool(values.get(key, False)) for key in ("attention_bias", "use_qk_norm"))
    return replace(arch, moe=corrected_moe(values), qkv_bias=qkv_bias, qk_norm=qk_norm)


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4Moe",
    PRE_NORM_LAYER + QKV_BIAS + HEAD_NORMS,
    keys={"num_experts": "n_routed_experts"},
    num_kv_heads=8,
    norm_eps=1e-5,
    partial_rotary=0.5,
    experts=CORRECTED_EXPERTS,
    details=_details,
)
