"""A random llama of a size that a GPU notices, as a Hugging Face checkpoint with the quickstart's tokenizer and sums beside it:

python -m scripts.gpu_run.random_model {tiny,1b} DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig

from scripts.quickstart_model import train_tokenizer, write_model, write_sums

# Heads of 64 take vLLM's FlashAttention on Hopper. 1b: 1.24 G parameters, 0.53 of them in embedding and output layer.
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 512},
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "vocab_size": 128256,
    },
}


def main(size: str, directory: Path) -> None:
    config = LlamaConfig(
        **SIZES[size], num_key_value_heads=SIZES[size]["num_attention_heads"] // 2, max_position_embeddings=2048,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    parameters = write_model(directory / "model", config)
    torch.set_default_dtype(torch.float32)
    train_tokenizer(directory / "model")
    write_sums(directory / "data")
    print(f"{parameters:,} parameters -> {directory}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
