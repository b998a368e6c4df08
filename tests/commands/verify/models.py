"""config.json of one large model per family, with the features that a small version has to keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.trainer.public_models import DEEPSEEK_7B, LLAMA_1B, MINISTRAL_3B, QWEN_05B, VISION_30B_A3B, facts_of

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "use_sliding_window": True,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0, 5],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": None,
}
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 62,
    "hidden_size": 5376,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "intermediate_size": 21504,
    "query_pre_attn_scalar": 168,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 1024,
}

MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
}
# InternVL3-1B: InternViT-300M before Qwen2.5-0.5B.
INTERNVL: dict[str, Any] = {
    "architectures": ["InternVLForConditionalGeneration"],
    "model_type": "internvl",
    "image_token_id": 151667,
    "tie_word_embeddings": False,
    "text_config": facts_of("Qwen2.5-0.5B-Instruct") | {"vocab_size": 151674, "tie_word_embeddings": False},
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "attention_bias": True,
        "image_size": [448, 448],
        "patch_size": [14, 14],
    },
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": DEEPSEEK_7B,
    "llama3": LLAMA_1B,
    "qwen2": QWEN_05B,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "ministral3": MINISTRAL_3B,
    "gpt_oss": facts_of("gpt-oss-120b"),
    "gemma3": GEMMA3,
    "qwen3_next": facts_of("Qwen3-Next-80B-A3B-Instruct"),
    "qwen3_5": facts_of("Qwen3.5-27B"),
    "qwen3_5_moe": facts_of("Qwen3.5-35B-A3B"),
    "glm4_moe": facts_of("GLM-4.5"),
    "deepseek_v3": facts_of("DeepSeek-V3"),
    "qwen2_5_vl": facts_of("Qwen2.5-VL-3B-Instruct"),
    "qwen3_vl": facts_of("Qwen3-VL-4B-Instruct"),
    "qwen3_vl_moe": VISION_30B_A3B,
    "internvl": INTERNVL,
}


def write_config_json(folder: Path, model: str, **changes: Any) -> str:
    """A checkpoint directory without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model] | changes))
    return str(folder)
