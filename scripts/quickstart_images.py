"""Write the inputs of the quickstart with images: a small random Qwen3-VL, pictures of squares, and questions that count them.

python scripts/quickstart_images.py runs/quickstart-images
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 80, 220)}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
NUM_TRAIN, NUM_EVAL = 1200, 100
MOST, CELL, SIDE = 3, 32, 96  # squares of a colour, pixels of a cell and of a picture; a feature sees one cell
# Demonstrations of two squares or more mostly forget one: supervised training learns the mistake, and PPO has to unlearn it.
FORGOTTEN = 0.7
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the inputs of the quickstart with images.")
    parser.add_argument("directory", type=Path, help="receives model/, pictures/ and data/")
    parser.add_argument("--shuffled", action="store_true", help="give every question another one's picture: nothing can be learned")
    arguments = parser.parse_args()
    directory = arguments.directory
    parameters = write_model(directory / "model")
    write_tokenizer(directory / "model")
    write_processor(directory / "model")
    counts = write_pictures(directory / "pictures")
    write_questions(directory, counts, shuffled=arguments.shuffled)
    print(f"model: Qwen3-VL, {parameters:,} parameters -> {directory / 'model'}")
    print(
        f"data: {len(counts):,} pictures, {3 * NUM_TRAIN:,} training and {3 * NUM_EVAL} held-out questions -> {directory / 'data'}"
    )


def model_config() -> Qwen3VLConfig:
    ids = {name: 256 + number for number, name in enumerate(SPECIALS)}  # behind the bytes
    text = dict(
        vocab_size=272,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.06,
        pad_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
    )
    vision = dict(
        depth=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=2,
        patch_size=CELL // 2,
        out_hidden_size=128,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0],
        initializer_range=0.06,
    )
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def write_model(directory: Path) -> int:
    """Save a random model; returns its number of parameters."""
    torch.manual_seed(SEED)
    model = Qwen3VLForConditionalGeneration(model_config())
    model.generation_config = GenerationConfig(eos_token_id=258, pad_token_id=256)
    model.save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())


def write_tokenizer(directory: Path, chat_template: str | None = None, specials: tuple[str, ...] = SPECIALS) -> None:
    """Save a tokenizer of bytes, with `specials` behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate((*alphabet, *specials))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(list(specials))
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **ends).save_pretrained(directory)


def write_processor(directory: Path) -> None:
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": CELL // 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": CELL**2, "longest_edge": 64 * CELL**2},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    # vLLM builds the whole processor of such a model, videos included.
    video = {**settings, "video_processor_type": "Qwen3VLVideoProcessor"}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))


def write_pictures(directory: Path) -> list[dict[str, int]]:
    """Write the pictures; returns how many squares of each colour each one has."""
    directory.mkdir(parents=True)
    generator, counts = numpy.random.default_rng(SEED), []
    cells = [(x, y) for x in range(0, SIDE, CELL) for y in range(0, SIDE, CELL)]
    for number in range(NUM_TRAIN + NUM_EVAL):
        counts.append(dict(zip(COLOURS, generator.integers(0, MOST + 1, 3).tolist())))
        image = Image.new("RGB", (SIDE, SIDE), (245, 245, 240))
        draw, places = ImageDraw.Draw(image), iter(generator.permutation(cells).tolist())
        for colour, count in counts[-1].items():
            for x, y in (next(places) for _ in range(count)):
                draw.rectangle([x + 2, y + 2, x + CELL - 3, y + CELL - 3], fill=COLOURS[colour])
        image.save(directory / f"{number}.png")
    return counts


def write_questions(directory: Path, counts: list[dict[str, int]], *, shuffled: bool) -> None:
    generator = numpy.random.default_rng(SEED + 1)
    shown = generator.permutation(len(counts)).tolist() if shuffled else list(range(len(counts)))
    (directory / "data").mkdir()
    sets = {"train": range(NUM_TRAIN), "eval": range(NUM_TRAIN, len(counts)), "sft": range(NUM_TRAIN)}
    for name, numbers in sets.items():
        with (directory / "data" / f"{name}.jsonl").open("w") as file:
            for number in numbers:
                for colour, count in counts[number].items():
                    forgets = name == "sft" and count > 1 and generator.random() < FORGOTTEN
                    record = {
                        "prompt": f"<image>{colour}=",
                        "answer": str(count - 1 if forgets else count),
                        "image": f"{shown[number]}.png",
                    }
                    file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
