"""Checkpoint directories without real weights: plans and checks read config.json, the weights' headers and the tokenizer."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from megappo.models.hf_config import arch_of
from megappo.models.weight_map import hf_tensors
from scripts.arithmetic import train_tokenizer

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
SPARSE = TINY | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
LLAMA_7B = TINY | {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def write_checkpoint(folder: Path, facts: dict[str, Any] = TINY, *, weights: bool = True, tokenizer: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(facts))
    if weights:
        try:
            write_weights(folder / "model.safetensors", hf_tensors(arch_of(facts), value_head="num_labels" in facts))
        except ValueError:  # an architecture that is refused has no tensors to write
            write_weights(folder / "model.safetensors", {})
    if tokenizer:
        train_tokenizer(folder)
    return folder


def write_weights(file: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Write a safetensors file of zeros in bf16. It takes no space: all but its header is a hole."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(content)) + content)
        out.truncate(out.tell() + end)


def write_prompts(path: Path, count: int = 100) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(count)))
    return path


def write_run(folder: Path, extra: str = "") -> Path:
    """A configuration file with its checkpoint and prompts: policy tp 2, critic pp 2 on 2 ranks, as in the quickstart."""
    model = write_checkpoint(folder / "model")
    prompts = write_prompts(folder / "train.jsonl")
    path = folder / "run.yaml"
    path.write_text(
        f"run: {{num_ranks: 2, device: cpu, output_dir: {folder / 'runs'}}}\n"
        f"policy: {{model: {model}, dtype: fp32, parallel: {{tp: 2}}}}\n"
        "critic: {dtype: fp32, parallel: {pp: 2}}\n"
        f"data: {{train: {prompts}, chat_template: false, max_prompt_tokens: 16, prompts_per_step: 32}}\n"
        "rollout: {max_response_tokens: 8, samples_per_prompt: 2}\n"
        "algorithm: {mini_batch_size: 16}\n" + extra
    )
    return path
