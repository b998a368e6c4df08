"""gpt-oss: attention with sinks, a window in every other layer and biases; experts of a clamped SwiGLU, with biases."""

from __future__ import annotations

from dataclasses import replace

from megappo.models.arch import Clamp, ModelArch
from megappo.models.family import Family, NotImplementedByFamilies, StackedExperts, Values, Window, read_moe
from megappo.models.weight_rules import MLP, OUTPUT_BIAS, PRE_NORM_LAYER, QKV_BIAS, SINKS, Matrix


def _details(values: Values, arch: ModelArch) -> ModelArch:
    if not values.get("attention_bias", True):
        raise NotImplementedByFamilies("attention_bias false is not supported; gpt_oss has biases on q, k, v and o")
    slides = tuple(layer % 2 == 0 for layer in range(arch.num_layers))
    if values.get("layer_types") is None and arch.sliding_window is not None:
        arch = replace(arch, sliding_layers=slides)  # transformers' default
    window = values.get("sliding_window", 128)
    if window is not None and window < arch.max_positions and arch.sliding_layers != slides:
        readings = "transformers has the window in the named layers, vLLM in every other one from the first on"
        raise NotImplementedByFamilies(f"layer_types: {readings}; other layers are not supported")
    clamp = Clamp(values.number("swiglu_alpha", 1.702), values.number("swiglu_limit", 7.0))
    moe = read_moe(values, "intermediate_size", norm_topk_prob=True, clamp=clamp)
    return replace(arch, moe=moe, output_bias=True, keeps_scores=True)


GPT_OSS = Family(
    "gpt_oss",
    "GptOss",
    (*(rule for rule in PRE_NORM_LAYER if rule not in MLP), *QKV_BIAS, OUTPUT_BIAS, SINKS),
    keys={"num_experts": "num_local_experts"},
    head_dim=64,
    num_kv_heads=8,
    norm_eps=1e-5,
    window=Window(default=128, first_layer=0, sampler_by_layer=True),
    experts=StackedExperts(
        Matrix("mlp.router.weight", "mlp.router.weight", "experts", "hidden"),
        beside=(Matrix("mlp.router.bias", "mlp.router.bias", "experts"),),
    ),
    defaults={"rope_theta": 150000.0},
    details=_details,
)
