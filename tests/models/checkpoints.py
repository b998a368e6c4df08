"""Small random Hugging Face checkpoints of every family, with nothing left at a value that would hide a mistake (norms are not 1,
biases are not 0), and the logits that transformers computes with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

# Lengths of the test sequences: unequal, one token, equal pairs, and a total that tp 2 does not divide.
LENGTHS = (7, 1, 40, 12, 40, 33, 12)
_BASE: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=131,
    max_position_embeddings=256,
    attn_implementation="eager",
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
)
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_MINISTRAL = {
    **_YARN,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.1,
}

_GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

# Delta nets and attention in turn. A norm of their output widens what is near 0, and with it rounding: transformers' own is 1e-5 of
# fp64 with the usual eps.
DELTA_NETS: dict[str, Any] = dict(
    full_attention_interval=2,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    rms_norm_eps=1e-3,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
)

# name -> (transformers stem, config)
CASES: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", dict(head_dim=16)),
    "llama3_tied": ("Llama", dict(rope_parameters=_LLAMA3, tie_word_embeddings=True)),
    "llama_linear": ("Llama", dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0})),
    "qwen2_tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2_yarn": ("Qwen2", dict(rope_parameters=_YARN)),
    "qwen3": ("Qwen3", dict(head_dim=24)),
    "mistral": ("Mistral", dict(head_dim=32, sliding_window=None)),
    # Windows that some of the sequences exceed; Qwen's is in the second layer only.
    "mistral_window": ("Mistral", dict(head_dim=16, sliding_window=9)),
    "qwen2_window": ("Qwen2", dict(use_sliding_window=True, sliding_window=12, max_window_layers=1)),
    # Every second layer has the window and a rotary embedding of its own; scores have another scale than heads would give them.
    "gemma3": (
        "Gemma3",
        dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=9, sliding_window_pattern=2, rope_parameters=_GEMMA3_ROPES),
    ),
    "ministral3_tied": ("Ministral3", dict(head_dim=20, rope_parameters=_MINISTRAL, tie_word_embeddings=True)),
    "qwen3_5": ("Qwen3_5", dict(head_dim=16, **DELTA_NETS)),
}

_SIGMOIDS = dict(
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=2.5,
)
_LATENT = dict(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
_LATENT |= dict(head_dim=8, num_key_value_heads=4)  # of all heads
_PLAIN_YARN = {key: value for key, value in _YARN.items() if not key.startswith("mscale")} | {"truncate": False}
_HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

# With experts a layout with tp needs sequence parallel, which the tables of the dense cases leave out.
EXPERT_CASES: dict[str, tuple[str, dict]] = {
    "glm4_moe": (
        "Glm4Moe",
        dict(**_SIGMOIDS, head_dim=24, use_qk_norm=True, attention_bias=True, rope_parameters=_HALF_ROTATED),
    ),
    "deepseek_v3": ("DeepseekV3", dict(**_SIGMOIDS | {"n_group": 4, "topk_group": 3}, **_LATENT, rope_parameters=_YARN)),
    "gpt_oss": (
        "GptOss",
        dict(
            head_dim=24, num_local_experts=8, num_experts_per_tok=3, sliding_window=6, swiglu_limit=0.5, rope_parameters=_PLAIN_YARN
        ),
    ),
    "qwen3_next": (
        "Qwen3Next",
        dict(
            head_dim=24,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=16,
            num_experts=8,
            num_experts_per_tok=3,
            **DELTA_NETS,
        ),
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        dict(moe_intermediate_size=24, shared_expert_intermediate_size=16, num_experts=8, num_experts_per_tok=3, **DELTA_NETS),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        dict(head_dim=24, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True),
    ),
    "mixtral": ("Mixtral", dict(intermediate_size=24, num_local_experts=8, num_experts_per_tok=3)),
}

DELTA_CASES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
COMPOSITE = "mistral3"
"""Mistral3ForConditionalGeneration: a vision tower beside the language model, as Ministral 3 is shipped."""
_VISION = dict(
    model_type="pixtral",
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    head_dim=8,
    image_size=28,
    patch_size=14,
)


def composite_config(**changes: object) -> transformers.Mistral3Config:
    text: dict[str, Any] = {**_BASE, **CASES["ministral3_tied"][1], **changes, "model_type": "ministral3"}
    others: dict[str, Any] = {"attn_implementation": text.pop("attn_implementation"), "vision_config": _VISION}
    return transformers.Mistral3Config(text_config=text, tie_word_embeddings=True, **others)


def hf_config(case: str, **changes: object) -> transformers.PretrainedConfig:
    """The case's configuration, as transformers has it."""
    stem, config = {**CASES, **EXPERT_CASES}[case]
    return getattr(transformers, f"{stem}ForCausalLM").config_class(**{**_BASE, **config, **changes})


def write_checkpoint(folder: Path, case: str, head: str = "CausalLM", seed: int = 0, **changes: object) -> torch.nn.Module:
    """Write one case to `folder` in fp32 and return the transformers model."""
    torch.manual_seed(seed)
    if case == COMPOSITE:
        model = transformers.Mistral3ForConditionalGeneration(composite_config(**changes)).float().eval()
    else:
        stem, _ = {**CASES, **EXPERT_CASES}[case]
        if head != "CausalLM" and case in ("gemma3", "qwen3_5"):
            stem += "Text"
        model = getattr(transformers, f"{stem}For{head}")(hf_config(case, **changes)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
                if case == "gemma3" or (case in DELTA_CASES and "linear_attn" not in name):  # whose weights are distances from 1
                    parameter.sub_(1.0)
            elif case in DELTA_CASES and (fill := fill_of_delta_net(name)) is not None:
                fill(parameter)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.2)
            else:
                parameter.normal_(0, 0.12)
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.normal_(0, 0.2)
    model.save_pretrained(folder, max_shard_size="100KB")
    return model


def fill_of_delta_net(name: str) -> Callable[[torch.Tensor], object] | None:
    """How a tensor of a model with delta nets starts, if not as others: decays and kernels near those of trained ones, and
    embeddings that a norm does not widen."""
    fills: dict[str, Callable[[torch.Tensor], object]] = {
        "A_log": lambda x: x.uniform_(-3.0, 0.0),
        "dt_bias": lambda x: x.uniform_(-1.0, 0.0),
        "conv1d.weight": lambda x: x.normal_(0, 0.5),
        "embed_tokens.weight": lambda x: x.normal_(0, 1.0),
    }
    return next((fill for end, fill in fills.items() if name.endswith(end)), None)


def example_sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, _BASE["vocab_size"], (n,), generator=generator) for n in LENGTHS]


def reference_logits(model: torch.nn.Module) -> torch.Tensor:
    """[T, vocab] fp32, one sequence at a time."""
    with torch.no_grad():
        return torch.cat([model(input_ids=tokens[None]).logits[0] for tokens in example_sequences()])
