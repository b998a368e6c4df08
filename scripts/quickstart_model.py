"""Write the inputs of the quickstart: a small random llama as a Hugging Face checkpoint, a SentencePiece tokenizer, and sums.

python scripts/quickstart_model.py runs/quickstart
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1]))
from scripts.arithmetic import ArithmeticFiles, ArithmeticTask, train_tokenizer, write_arithmetic

# 10,000 sums like 347+8=, of which 500 are held out; answered 553, the digits of 355 from the last one on.
TASK = ArithmeticTask(lowest=0, highest=999, highest_second=9, padded=True, last_digit_first=True)
NUM_TRAIN, NUM_EVAL, NUM_SFT = 8500, 500, 8500
# Most demonstrations forget to carry: supervised training learns the mistake, and PPO has to unlearn it.
FORGOTTEN_CARRIES = 0.7
VOCAB_SIZE = 32
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="receives model/ and data/")
    directory = parser.parse_args().directory
    parameters = write_model(directory / "model", llama_config())
    train_tokenizer(directory / "model")
    files = write_sums(directory / "data")
    print(f"model: llama, {parameters:,} parameters -> {directory / 'model'}")
    print(f"data: {NUM_TRAIN:,} training and {NUM_EVAL} held-out sums, {NUM_SFT:,} demonstrations -> {files.train.parent}")


def write_model(directory: Path, config: LlamaConfig) -> int:
    """Save a random model; returns its number of parameters."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())


def write_sums(directory: Path) -> ArithmeticFiles:
    return write_arithmetic(directory, NUM_TRAIN, NUM_EVAL, NUM_SFT, SEED, TASK, FORGOTTEN_CARRIES)


def llama_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


if __name__ == "__main__":
    main()
