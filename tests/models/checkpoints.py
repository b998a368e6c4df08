"""Small random Hugging Face checkpoints of every family, with nothing left at a value that would hide a mistake (norms are not 1,
biases are not 0), and the logits that transformers computes with them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

# Lengths of the test sequences: unequal, one token, equal pairs, and a total that tp 2 does not divide.
LENGTHS = (7, 1, 40, 12, 40, 33, 12)
_BASE = dict(
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
    "ministral3_tied": ("Ministral3", dict(head_dim=20, rope_parameters=_MINISTRAL, tie_word_embeddings=True)),
}

# With experts a layout with tp needs sequence parallel, which the tables of the dense cases leave out.
EXPERT_CASES: dict[str, tuple[str, dict]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        dict(head_dim=24, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True),
    ),
}

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


def composite_config(**changes: object) -> transformers.PretrainedConfig:
    text = {**_BASE, **CASES["ministral3_tied"][1], **changes, "model_type": "ministral3"}
    attention = text.pop("attn_implementation")
    return transformers.Mistral3Config(
        text_config=text, vision_config=_VISION, tie_word_embeddings=True, attn_implementation=attention
    )


def hf_config(case: str, **changes: object) -> transformers.PretrainedConfig:
    """The case's configuration, as transformers has it."""
    stem, config = {**CASES, **EXPERT_CASES}[case]
    return getattr(transformers, f"{stem}Config")(**{**_BASE, **config, **changes})


def write_checkpoint(folder: Path, case: str, head: str = "CausalLM", seed: int = 0, **changes: object) -> torch.nn.Module:
    """Write one case to `folder` in fp32 and return the transformers model."""
    torch.manual_seed(seed)
    if case == COMPOSITE:
        model = transformers.Mistral3ForConditionalGeneration(composite_config(**changes)).float().eval()
    else:
        stem, _ = {**CASES, **EXPERT_CASES}[case]
        model = getattr(transformers, f"{stem}For{head}")(hf_config(case, **changes)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
            else:
                parameter.normal_(0, 0.12)
    model.save_pretrained(folder, max_shard_size="100KB")
    return model


def example_sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, _BASE["vocab_size"], (n,), generator=generator) for n in LENGTHS]


def reference_logits(model: torch.nn.Module) -> torch.Tensor:
    """[T, vocab] fp32, one sequence at a time."""
    with torch.no_grad():
        return torch.cat([model(input_ids=tokens[None]).logits[0] for tokens in example_sequences()])
