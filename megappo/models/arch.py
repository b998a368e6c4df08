"""The facts of a Hugging Face config.json that decide shapes and arithmetic, normalised into one frozen value.

Reads JSON only: no remote code, no transformers. A feature of the config that the model does not implement is an error, never
ignored. Which tensors an architecture has is `families.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

from megappo.models.implementation import Implementation
from megappo.models.window import read_window

_HEADS = ("CausalLM", "SequenceClassification", "TokenClassification")
_STEMS = {
    "Llama": "llama",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3Moe": "qwen3_moe",
    "Mistral": "mistral",
    "Ministral3": "ministral3",
}

ARCHITECTURES: dict[str, str] = {f"{stem}For{head}": family for stem, family in _STEMS.items() for head in _HEADS}
"""Hugging Face architecture -> family. Mistral3ForConditionalGeneration is resolved through its text_config."""

_COMPOSITE = "Mistral3ForConditionalGeneration"
_DEFAULT_HEAD_DIM = {"qwen3": 128, "qwen3_moe": 128, "ministral3": 128}
_DEFAULT_KV_HEADS = {"mistral": 8, "ministral3": 8}
_DEFAULT_EPS = {"ministral3": 1e-5}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. Fields that `type` does not use are None; `llama4_beta` scales queries by position (ministral3)."""

    type: str = "default"
    theta: float = 10000.0
    factor: float | None = None
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    llama4_beta: float | None = None


@dataclass(frozen=True)
class MoeArch:
    """Mixture of experts in place of the MLP. ffn_size: columns of one expert. norm_topk_prob: the weights of the chosen
    experts add up to 1. dense_layers: numbers of the layers that have a plain MLP.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    norm_topk_prob: bool
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelArch:
    """One decoder-only transformer. qkv_bias: biases on q, k and v only. qk_norm: RMSNorm of each head of q and k.

    sliding_window: tokens that a token sees, itself included, in the layers whose `sliding_layers` is true (one entry per layer).
    None and () where every layer sees the whole sequence.
    """

    family: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool
    norm_eps: float
    rope: Rope
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    moe: MoeArch | None = None

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer has experts. layer: from 0, in the whole model."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def has_dense_mlp(self) -> bool:
        return self.moe is None or bool(self.moe.dense_layers)

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


def hf_architecture(family: str, head: str) -> str:
    """Name of transformers' text-only class, for example ("qwen2", "CausalLM") -> Qwen2ForCausalLM."""
    return next(f"{stem}For{head}" for stem, name in _STEMS.items() if name == family)


def padded_vocab(arch: ModelArch, tp: int) -> int:
    """Vocabulary rounded up so that every tp rank holds the same number of rows."""
    return -(-arch.vocab_size // tp) * tp


def vocab_shard(arch: ModelArch, tp: int, tp_rank: int) -> tuple[int, int]:
    """(global id of the first vocabulary row of this tp rank, how many of its rows are real vocabulary; the rest is padding)."""
    rows = padded_vocab(arch, tp) // tp
    start = tp_rank * rows
    return start, max(0, min(rows, arch.vocab_size - start))


def check_tp(arch: ModelArch, tp: int) -> None:
    """Raises ValueError where tp does not divide heads, KV heads or the MLP, naming the largest tp that does."""
    sizes = [("KV heads", arch.num_kv_heads), ("attention heads", arch.num_heads)]
    if arch.has_dense_mlp:
        sizes.append(("MLP columns", arch.ffn_size))
    largest = gcd(*(size for _, size in sizes))
    for what, size in sizes:
        if size % tp:
            fix = f"the largest tp that works is {largest}"
            raise ValueError(f"tp {tp} does not divide the {size} {what} of this {arch.family} model; {fix}")


def check_cp(arch: ModelArch, tp: int, cp: int, implementation: Implementation) -> None:
    """Raises ValueError where cp does not fit the heads of a tp rank, naming the sizes that do. `check_tp` comes first.

    Only attention that exchanges tokens for heads has the limit: ours, and TransformerEngine's layers with a sliding window.
    """
    if implementation == "transformer_engine" and arch.sliding_window is None:
        return
    heads, kv_heads = arch.num_heads // tp, arch.num_kv_heads // tp

    def fits(size: int) -> bool:
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    if not fits(cp):
        has = f"a tp rank has {heads} attention heads and {kv_heads} KV heads (tp {tp})"
        sizes = ", ".join(str(size) for size in range(1, heads + 1) if fits(size))
        raise ValueError(f"cp {cp} does not divide the heads: {has}; the sizes that work are {sizes}")


def check_ep(arch: ModelArch, ep: int, etp: int) -> None:
    """Raises ValueError where the experts cannot be distributed over ep ranks, or each of them cut over etp ranks."""
    if arch.moe is None:
        for axis, size in (("ep", ep), ("etp", etp)):
            if size > 1:
                raise ValueError(f"{axis} {size} needs experts and this {arch.family} model has none; set {axis} to 1")
        return
    if arch.moe.num_experts % ep:
        fix = f"use a divisor of {arch.moe.num_experts}"
        raise ValueError(f"ep {ep} does not divide the {arch.moe.num_experts} experts of this {arch.family} model; {fix}")
    if arch.moe.ffn_size % etp:
        columns = f"the {arch.moe.ffn_size} columns of an expert of this {arch.family} model"
        raise ValueError(f"etp {etp} does not divide {columns}; use a divisor of {arch.moe.ffn_size}")


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint directory. ValueError where it is missing or not JSON."""
    file = Path(path) / "config.json"
    if not file.is_file():
        what = "has no config.json" if Path(path).is_dir() else "is not a directory"
        raise ValueError(f"{path} {what}; a Hugging Face checkpoint directory is needed")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return config


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a config, as a stand-alone text-only config (identity for text-only checkpoints)."""
    if _architecture(config) != _COMPOSITE:
        return dict(config)
    text = dict(config.get("text_config") or {})
    stem = {"mistral": "Mistral", "ministral3": "Ministral3"}.get(text.get("model_type", "mistral"))
    if stem is None:
        raise ValueError(f"{_COMPOSITE} with text_config.model_type {text['model_type']!r}: supported are mistral, ministral3")
    text["architectures"] = [f"{stem}ForCausalLM"]
    text.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", True))
    for key in ("quantization_config", "auto_map"):
        if key in config:
            text[key] = config[key]
    for key in ("dtype", "torch_dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"):
        if key in config:
            text.setdefault(key, config[key])
    return text


def read_arch(path: str | Path) -> ModelArch:
    """Architecture of the checkpoint directory `path`. ValueError names the key and value that is not supported."""
    try:
        return arch_of(read_config(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from None


def arch_of(config: Mapping[str, Any]) -> ModelArch:
    """Architecture of a parsed config.json."""
    text = text_config(config)
    architecture = _architecture(text)
    if "auto_map" in text:
        raise ValueError("config.json has auto_map (remote code), which is never run; use a built-in architecture")
    if architecture not in ARCHITECTURES:
        supported = ", ".join([f"{stem}ForCausalLM" for stem in _STEMS] + [_COMPOSITE])
        raise ValueError(f"architecture {architecture} is not supported; supported are {supported}")
    family = ARCHITECTURES[architecture]
    _refuse_unimplemented(text, family)
    hidden, heads = _positive(text, "hidden_size"), _positive(text, "num_attention_heads")
    kv_heads = _positive_or(text, "num_key_value_heads", _DEFAULT_KV_HEADS.get(family), heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = _positive_or(text, "head_dim", _DEFAULT_HEAD_DIM.get(family), hidden // heads)
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd; rotary embeddings need an even one")
    num_layers, max_positions = _positive(text, "num_hidden_layers"), _positive(text, "max_position_embeddings")
    window, sliding_layers = read_window(text, family, num_layers, max_positions)
    return ModelArch(
        family=family,
        architecture=_architecture(config),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=_positive(text, "intermediate_size"),
        vocab_size=_positive(text, "vocab_size"),
        max_positions=max_positions,
        tied_embeddings=bool(text.get("tie_word_embeddings", False)),
        norm_eps=float(text.get("rms_norm_eps", _DEFAULT_EPS.get(family, 1e-6))),
        rope=_read_rope(text, family),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        moe=_read_moe(text) if family == "qwen3_moe" else None,
        sliding_window=window,
        sliding_layers=sliding_layers,
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or ["(none: config.json has no architectures)"]
    return names[0]


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key} = {value!r}; a positive integer is needed")
    return value


def _positive_or(config: Mapping[str, Any], key: str, family_default: int | None, otherwise: int) -> int:
    """The value; the family's default where the key is absent; `otherwise` where there is none, or the key is null."""
    if config.get(key, family_default) is None:
        return otherwise
    return _positive({key: family_default, **config}, key)


def _read_moe(config: Mapping[str, Any]) -> MoeArch:
    """router_aux_loss_coef is not read: the loss weighs what the run's configuration says."""
    # transformers 5 spells the number of experts either way.
    num_experts = _positive(config, "num_experts" if "num_experts" in config else "num_local_experts")
    top_k, num_layers = _positive(config, "num_experts_per_tok"), _positive(config, "num_hidden_layers")
    norm_topk_prob = bool(config.get("norm_topk_prob", False))
    if top_k > num_experts:
        raise ValueError(f"num_experts_per_tok {top_k} is more than the {num_experts} experts")
    if top_k == 1 and norm_topk_prob:
        raise ValueError("norm_topk_prob with num_experts_per_tok 1 gives every expert the weight 1 and the router no gradient")
    step, listed = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    dense = tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)
    if len(dense) == num_layers:
        raise ValueError("decoder_sparse_step and mlp_only_layers leave no layer with experts; use the qwen3 architecture")
    return MoeArch(num_experts, top_k, _positive(config, "moe_intermediate_size"), norm_topk_prob, dense)


def _refuse_unimplemented(config: Mapping[str, Any], family: str) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"the checkpoint is quantised ({method}); training needs its bf16, fp16 or fp32 version")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act {activation!r} is not supported; only silu is")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ValueError(f"{key} = true is not supported (biases on o_proj or the MLP)")
    if config.get("attention_dropout"):
        raise ValueError(f"attention_dropout {config['attention_dropout']} is not supported; set it to 0 in config.json")
    if config.get("pretraining_tp", 1) not in (None, 1):
        raise ValueError(f"pretraining_tp {config['pretraining_tp']} is not supported; set it to 1 in config.json")


def _read_rope(config: Mapping[str, Any], family: str) -> Rope:
    given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError("rope_parameters per layer type are not supported")
    older_name = given.pop("type", None)
    kind = given.pop("rope_type", None) or older_name or "default"
    if kind not in _ROPE_TYPES:
        raise ValueError(f"rope type {kind!r} is not supported; supported are {', '.join(_ROPE_TYPES)}")
    theta = given.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    partial = given.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {partial} is not supported; the whole head must be rotated")
    given.pop("max_position_embeddings", None)  # written by ministral3 configs beside the real one, read by nobody
    beta = given.pop("llama_4_scaling_beta", None)
    original = given.pop("original_max_position_embeddings", None)
    if (beta is not None) != (family == "ministral3"):
        raise ValueError(f"rope llama_4_scaling_beta is {beta}; ministral3 needs it and no other family has it")
    if beta is not None and original is None:
        raise ValueError("rope original_max_position_embeddings is missing; llama_4_scaling_beta needs it")
    used = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    }[kind]
    # A key of another type set to null is harmless; a set one would change the model in a way that we do not know.
    unknown = sorted(key for key, value in given.items() if key not in used and value is not None)
    if unknown:
        raise ValueError(f"rope key {unknown[0]!r} is not known for rope type {kind!r}")
    fields = {key: given[key] for key in used if given.get(key) is not None}
    if kind in ("llama3", "yarn"):
        original = config.get("original_max_position_embeddings") or original or _positive(config, "max_position_embeddings")
    if kind == "yarn" and "factor" not in fields:
        fields["factor"] = _positive(config, "max_position_embeddings") / original
    missing = [key for key in ("factor", "low_freq_factor", "high_freq_factor") if key in used and key not in fields]
    if missing:
        raise ValueError(f"rope type {kind!r} needs the key {missing[0]!r}")
    return Rope(type=kind, theta=float(theta), original_max_positions=original, llama4_beta=beta, **fields)
