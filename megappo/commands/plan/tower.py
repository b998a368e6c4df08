"""Memory of a vision tower on the ranks of a first stage: bytes of its passes for each patch, and images of a prompt.

The tower is transformers' class, which recomputation leaves alone: one that trains keeps the activations of all its blocks. Every
tp and cp rank computes it for all images of the micro-batch. A test holds the bytes to those alive in real towers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from megappo.config.layout_checks import value_head_of
from megappo.config.role_sections import RoleConfig, TrainableConfig
from megappo.config.schema import TrainConfig
from megappo.data.images import PromptImages
from megappo.models.arch import ModelArch, VisionArch
from megappo.models.freeze import frozen_of
from megappo.models.vision_families import tower_shape

FP32 = 4


@dataclass(frozen=True)
class Shown:
    """Images that a sample shows at most. tokens: of all its images together. source: of that number, for the report."""

    tokens: int
    source: str


def shown_by_keys(config: TrainConfig, arch: ModelArch) -> Shown | None:
    """Return the most that a prompt may show as far as keys say: one image of `data.max_image_pixels`, or a prompt of nothing but
    images; None for a run without images."""
    data, vision = config.data, arch.vision
    if (data.image_key is None and not config.rollout.shown_images) or vision is None:
        return None
    largest = None if data.max_image_pixels is None else _largest(vision, data.max_image_pixels)
    if data.image_key is None:
        prompt = Shown(0, "none in the data")
    elif largest is not None and largest < data.max_prompt_tokens:
        prompt = Shown(largest, "one image of data.max_image_pixels; the data may have more")
    else:
        prompt = Shown(data.max_prompt_tokens, "all of data.max_prompt_tokens")
    return _with_answers(config, prompt, largest)


def _largest(vision: VisionArch, pixels: int) -> int:
    """Tokens of an image of so many pixels; of several tiles there is one of the whole too."""
    if not vision.tile:
        return max(1, pixels // (vision.patch * vision.merge) ** 2)
    tiles = max(1, pixels // vision.tile**2)
    return (tiles + (tiles > 1)) * (vision.tile // vision.patch // vision.merge) ** 2


def _with_answers(config: TrainConfig, shown: Shown, largest: int | None) -> Shown:
    """Add the images of an environment. largest: tokens of one, at most; None if unknown."""
    if not (count := config.rollout.shown_images):
        return shown
    room = config.rollout.max_response_tokens
    tokens = room if largest is None else min(room, count * largest)
    return Shown(shown.tokens + tokens, f"{shown.source}; {tokens:,} of an environment's")


def shown_in_data(config: TrainConfig, images: PromptImages) -> Shown:
    """Return the most that a prompt may show of these images."""
    largest = max(map(images.store.num_tokens, range(len(images.store))))
    source = f"at most {images.most} of at most {largest:,} tokens in the data"
    in_data = Shown(min(images.most * largest, config.data.max_prompt_tokens), source)
    return _with_answers(config, in_data, images.store.most_tokens)


def tower_trains(settings: RoleConfig, arch: ModelArch) -> bool:
    """True if a part of the vision tower of a role's model trains; adapters are on its language model alone."""
    if arch.vision is None or not isinstance(settings, TrainableConfig) or settings.lora:
        return False
    frozen = frozen_of(settings, arch, value_head=value_head_of(settings) is not None)
    return not frozen.issuperset(name for name, _ in arch.vision.tensors)


@cache
def kept_bytes(vision: VisionArch, itemsize: int) -> int:
    """Bytes per patch that a tower which trains keeps from its forward to its backward pass."""
    hidden, inner, depth, heads, pixels, gated, *_ = tower_shape(vision)
    wide = FP32 // itemsize
    # A norm: RMSNorm's input in fp32, the normalised input, the output; LayerNorm's input and output. Query, key and value in one
    # tensor, query and key rotated, the output, and all images' outputs in one tensor.
    norm = (wide + 2 if gated else 2) * hidden
    # Gate, SiLU, up and the product; or the first product and its GELU.
    block = 2 * norm + 7 * hidden + (4 if gated else 2) * inner
    # Features: a norm, the first product and its GELU. Those of deepstack share the input with a block.
    mergers = norm + 2 * hidden + 3 * hidden * vision.deepstack
    tables = 2 * FP32 * hidden // heads  # cosines and sines
    sums = depth * FP32 * (heads + 2)  # of the softmax and of two norms
    return itemsize * (depth * block + mergers + pixels) + tables + sums


@cache
def working_bytes(vision: VisionArch, itemsize: int) -> int:
    """Most bytes per patch that are alive at once in a pass of the tower without a graph, its pixels included."""
    hidden, inner, _, heads, pixels, gated, *_ = tower_shape(vision)
    wide, plain = FP32 // itemsize, pixels // vision.frames
    # Normalised in fp32 twice, or copied for every frame; beside the bytes of the images.
    prepared = plain * (1 + max(2 * FP32, itemsize * (1 + vision.frames)))
    # Residual, its norm, and query, key and value in one tensor. Then these rotated in fp32, and at the key the rotated query and
    # three products; or the rotated ones, the outputs, all outputs in one tensor, and their projection.
    rotation = 5 + (2 * wide if wide > 1 else 0) + 4 * wide
    attention = (10 if vision.tile else max(rotation, 10)) * hidden
    mlp = 3 * hidden + (3 if gated or vision.tile else 2) * inner
    tables = 0 if vision.tile else 2 * FP32 * hidden // heads
    return max(prepared, itemsize * (pixels + max(attention, mlp)) + tables)
