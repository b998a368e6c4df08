"""Families whose experts are chosen by a softmax: Mixtral, whose tensors have names of their own; Qwen3 with experts instead of the
MLP, in some or all layers; gpt-oss, with sinks, a window in every other layer, biases, and experts of a clamped SwiGLU."""

from __future__ import annotations

from dataclasses import replace

from megappo.models.arch import Clamp, ModelArch
from megappo.models.families.dense import QWEN3
from megappo.models.family import Experts, Family, NotImplementedByFamilies, StackedExperts, Values, Window, read_moe
from megappo.models.weight_rules import MLP, OUTPUT_BIAS, PRE_NORM_LAYER, QKV_BIAS, ROUTER, SINKS, Matrix

_BLOCK = "block_sparse_moe."


def _mixtral(values: Values, arch: ModelArch) -> ModelArch:
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
    details=_mixtral,
)


def dense_layers_of(values: Values, num_layers: int) -> tuple[int, ...]:
    """Numbers of the layers without experts. ValueError if no other is left."""
    step, listed = values.get("decoder_sparse_step") or 1, values.get("mlp_only_layers") or []
    dense = tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)
    if len(dense) == num_layers:
        fix = f"use the {QWEN3.name} architecture"
        raise ValueError(f"decoder_sparse_step and mlp_only_layers leave no layer with experts; {fix}")
    return dense


def _qwen3_moe(values: Values, arch: ModelArch) -> ModelArch:
    return replace(arch, moe=read_moe(values, dense_layers=dense_layers_of(values, arch.num_layers)))


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3Moe",
    QWEN3.rules,
    keys={"num_experts": "num_local_experts"},  # transformers 5 writes either
    num_kv_heads=4,
    window=Window(default=4096, switched=True),
    experts=Experts(ROUTER),
    details=_qwen3_moe,
)


def _gpt_oss(values: Values, arch: ModelArch) -> ModelArch:
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
    details=_gpt_oss,
)
