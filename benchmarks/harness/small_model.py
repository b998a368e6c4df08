"""A llama of random weights, small enough that steps of it take a second on two cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM


def write_small_model(folder: Path, *, vocab_size: int, num_layers: int) -> None:
    """Write its checkpoint of width 256, with the special ids of `scripts.arithmetic.train_tokenizer` and separate embeddings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)


def train(folder: Path, name: str, config: dict[str, Any], after_import: str = "") -> str | None:
    """Train to the end as run `name`; return the end of what the run said if it failed. after_import: AFTER_IMPORT of its ranks
    (`scripts/after_import`)."""
    config["run"]["name"] = name
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config))  # which is YAML too
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), *([str(root / "scripts" / "after_import")] if after_import else []), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(paths), "AFTER_IMPORT": after_import}
    command = [sys.executable, "-m", "megappo", "train", str(path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    return None if ended.returncode == 0 else (ended.stdout + ended.stderr)[-2000:]
