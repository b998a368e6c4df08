"""Tiny random checkpoints of architectures without a family, with nothing left at a value that would hide a mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import DELTA_NETS, fill_of_delta_net

_BASE: dict[str, Any] = dict(
    vocab_size=131,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_CHOSEN: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=32)
# One layer without experts, one with, and an expert that every token meets.
_SHARED: dict[str, Any] = dict(n_routed_experts=5, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, **_CHOSEN)
_ALTERNATING: dict[str, Any] = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
_LATENT: dict[str, Any] = dict(
    q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, num_key_value_heads=4, head_dim=8
)

# model type -> config
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {**_ALTERNATING, "query_pre_attn_scalar": 16},
    "gemma2": {**_ALTERNATING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0, "final_logit_softcapping": None},
    "gpt_oss": {**_ALTERNATING, "num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default"}},
    "mixtral": dict(num_local_experts=5, num_experts_per_tok=2),
    "qwen3_moe": dict(num_experts=5, **_CHOSEN),
    "glm4_moe": _SHARED,
    "deepseek_v3": {**_SHARED, **_LATENT},
    "minimax_m2": dict(num_local_experts=5, num_experts_per_tok=2),
    "olmo2": {},
    "phi3": {},
    "glm4": {},
    "cohere2": {**_ALTERNATING, "logit_scale": 0.25},
    "granite": dict(logits_scaling=4.0, embedding_multiplier=2.0, residual_multiplier=0.5),
    "starcoder2": dict(sliding_window=6),
    "seed_oss": {},
    "smollm3": {},
    "ernie4_5": {},
    "gpt_neox": {},
    "hunyuan_v1_dense": {},
    "llama": dict(attention_bias=True, mlp_bias=True),
    "qwen3_5_text": DELTA_NETS,
    "qwen3_5_moe_text": {**DELTA_NETS, **_CHOSEN, "num_experts": 5, "shared_expert_intermediate_size": 32},
}
# name -> (model type, config), the beginning of its refusal
_ROPE: dict[str, Any] = dict(rope_theta=1e4, factor=16.0, original_max_position_embeddings=16)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "longrope": (
        "phi3",
        dict(rope_parameters=dict(rope_type="longrope", long_factor=[1.7] * 8, short_factor=[1.0] * 8, **_ROPE)),
        "rope type 'longrope' depends on the longest sequence",
    ),
    "dynamic": ("olmo2", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)), "rope type 'dynamic'"),
    "capped logits": ("gemma2", dict(**_ALTERNATING), "final_logit_softcapping 30.0 caps the logits of this gemma2 model"),
    "chunks": (
        "llama4_text",
        dict(num_local_experts=4, num_experts_per_tok=1, attention_chunk_size=8, intermediate_size_mlp=96, no_rope_layers=[1, 0]),
        "llama4_text has layers of type 'chunked_attention'",
    ),
    "linear attention": (
        "qwen3_next",
        dict(
            num_experts=4,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            shared_expert_intermediate_size=32,
            layer_types=["linear_attention", "full_attention"],
            **_CHOSEN,
        ),
        "qwen3_next has layers of type 'linear_attention'",
    ),
    "state space": ("falcon_h1", {}, "falcon_h1 has layers of type 'hybrid'"),
    "encoder": ("bert", {}, "BertLMHeadModel has no list of its layers"),
    "no language model": ("clip", {}, "transformers has no causal language model of type clip_text_model"),
}


def config_of(kind: str, settings: dict[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(kind, **{**_BASE, **settings})


def write_composite(folder: Path, text: Path) -> None:
    """Write the gemma3_text checkpoint at `text` as it is shipped beside a vision tower: under other names, its config inside."""
    config = json.loads((text / "config.json").read_text())
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": config,
        "vision_config": {},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(outer))
    tensors = {}
    for file in text.glob("*.safetensors"):
        tensors |= {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_any_checkpoint(folder: Path, kind: str, seed: int = 0, **changes: Any) -> None:
    """Write a random model of `FAMILIES` to `folder` in fp32."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, {**FAMILIES[kind], **changes})).float().eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif "full_attention_interval" in FAMILIES[kind] and (fill := fill_of_delta_net(name)) is not None:
                fill(tensor)
            elif "sinks" in name or "correction" in name:
                tensor.normal_(0, 0.5)
            elif "rotary" not in name and "scale" not in name:
                tensor.normal_(0, 0.12)
    model.save_pretrained(folder, max_shard_size="100KB")
