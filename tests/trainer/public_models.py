"""Dimensions of the public models that the recipes name, as their config.json files state them, and their parameter totals."""

from __future__ import annotations

from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "max_position_embeddings": 262144,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

QWEN_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 21,
    "attention_dropout": 0.0,
}
QWEN_15B: dict[str, Any] = QWEN_05B | {
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
}
DEEPSEEK_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 102400,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "pretraining_tp": 1,
}
LLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "head_dim": 64,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": _LLAMA3_ROPE,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
}
MINISTRAL_3B: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "tie_word_embeddings": True,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "dequantize": False,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    },
    "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "num_hidden_layers": 24},
    "text_config": {
        "model_type": "ministral3",
        "num_hidden_layers": 26,
        "hidden_size": 3072,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 9216,
        "vocab_size": 131072,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _MINISTRAL_ROPE,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    },
}

# recipe -> (config.json, parameters, steps of a full run on the 7,473 training prompts of GSM8K). The totals of all but the last
# are those that the models' pages state; Ministral's counts its language model, by hand: embedding 131,072 x 3,072, 26 layers of
# 116,398,080 (query and output 3,072 x 4,096 each, key and value 3,072 x 1,024 each, MLP 3 x 3,072 x 9,216, two norms), norm.
PUBLIC: dict[str, tuple[dict[str, Any], int, int]] = {
    "gsm8k_qwen2.5_0.5b": (QWEN_05B, 494_032_768, 438),
    "gsm8k_qwen2.5_1.5b_megatron": (QWEN_15B, 1_543_714_304, 100),
    "gsm8k_qwen2.5_1.5b_fsdp2": (QWEN_15B, 1_543_714_304, 100),
    "gsm8k_deepseek_7b_chat": (DEEPSEEK_7B, 6_910_365_696, 110),
    "gsm8k_llama3.2_1b": (LLAMA_1B, 1_235_814_400, 351),
    "gsm8k_llama3.2_1b_multi": (LLAMA_1B, 1_235_814_400, 292),
    "gsm8k_ministral3_3b": (MINISTRAL_3B, 3_429_006_336, 351),
}

CONVERTED = {"gsm8k_deepseek_7b_verl"}
"""Recipes that `megappo convert` wrote: tests/commands/convert holds their text, test_recipes_fit.py of
tests/commands/plan their plan."""
