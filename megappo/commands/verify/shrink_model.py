"""A tiny model with every feature of a user's: a config.json derived from theirs, and random weights.

It keeps the family, rotary embedding, biases, norms of heads, tied embeddings, kinds of layers and the distribution of heads and
experts over ranks. Widths are the smallest that the layouts divide. Reads and writes JSON and safetensors only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save_file
from torch import Tensor

from megappo.commands.verify.recording import LONGEST_SEQUENCE
from megappo.config.role_sections import ParallelConfig
from megappo.data.images import write_store
from megappo.models.arch import ModelArch, VisionArch, check_cp, check_tp
from megappo.models.families.registry import FAMILIES
from megappo.models.family import usual_keys
from megappo.models.hf_config import arch_of, text_config
from megappo.models.implementation import Implementation
from megappo.models.weight_map import hf_tensors
from megappo.trainer.prepare.reward_model import is_classifier

HIDDEN_SIZE, HEAD_DIM = 32, 8
# Prime, so that every tp pads it.
VOCAB_SIZE = 131
PATCH = 4  # pixels
GRIDS = ((1, 2), (2, 2), (3, 1))  # rows and columns of features; the last one fills no window
SLIDING_WINDOW = 9  # tokens; shorter than most recorded sequences, so that it takes effect
# Scaled rotary embeddings differ from plain ones from this position on.
ORIGINAL_POSITIONS = 16
MAX_POSITIONS = 128
# A delta net's outputs are near 0 at the first tokens, and their norm widens them, and their rounding with them: a thousandfold
# with the usual eps of 1e-6.
DELTA_NORM_EPS = 1e-3
assert ORIGINAL_POSITIONS < LONGEST_SEQUENCE <= MAX_POSITIONS

_LEAST_COLUMNS, _LEAST_EXPERT_COLUMNS, _LEAST_EXPERTS, _MOST_ROUTES, _MOST_GROUPS = 24, 16, 4, 4, 4
# Keys that depend on the large vocabulary or on the checkpoint's shape; the small model states its own.
_IMAGE_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
# Decays near those of trained models, and values that the decay leaves.
_OF_DELTA_NETS = {"A_log": (-3.0, 0.0), "dt_bias": (-1.0, 0.0), "conv1d.weight": (-1.0, 1.0)}
_DROPPED = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "layer_types",
    "max_window_layers",
    "rope_parameters",
    "rope_scaling",
    "original_max_position_embeddings",
)


def small_config(
    config: Mapping[str, Any], num_layers: int, parallels: Sequence[ParallelConfig], implementation: Implementation
) -> dict[str, Any]:
    """Derive the small model's config.json, as its family spells it. parallels: layouts of all roles that use it."""
    arch = arch_of(config)
    text = usual_keys(text_config(config), FAMILIES[arch.family])
    heads, kv_heads = _heads(arch, parallels, implementation)
    small = {key: value for key, value in text.items() if key not in _DROPPED} | {
        "num_hidden_layers": num_layers,
        "hidden_size": HIDDEN_SIZE,
        "head_dim": HEAD_DIM,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": _at_least(_LEAST_COLUMNS, lcm(*(size for p in parallels for size in (p.tp, p.etp)))),
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": arch.tied_embeddings,
    }
    small |= (
        _rope(arch, text)
        | _window(arch, num_layers)
        | _experts(arch, parallels)
        | _latent(arch)
        | _delta(arch, parallels, num_layers)
    )
    own = FAMILIES[arch.family].keys  # transformers, under engine fsdp2, reads some keys by the family's names alone
    small = {own.get(key, key): value for key, value in small.items()}
    return small if arch.vision is None else _seeing(small, arch.vision, config)


def _heads(arch: ModelArch, parallels: Sequence[ParallelConfig], implementation: Implementation) -> tuple[int, int]:
    """Fewest (attention heads, KV heads) that fit all layouts."""
    # As in the user's model, KV heads are shared or not, one or several, and if possible repeated over tp or cp ranks.
    enough = max(arch.num_heads, 2 * lcm(*(p.tp * p.cp for p in parallels)))
    for as_theirs in (True, False):
        for heads in range(1, enough + 1):
            for kv_heads in (size for size in range(min(2, arch.num_kv_heads), heads + 1) if heads % size == 0):
                small = replace(arch, num_heads=heads, num_kv_heads=kv_heads, ffn_size=lcm(*(p.tp for p in parallels)))
                if (heads == kv_heads) != (arch.num_heads == arch.num_kv_heads) or not _fits(small, parallels, implementation):
                    continue
                if not as_theirs or all(_repeats(small, p) == _repeats(arch, p) for p in parallels):
                    return heads, kv_heads
    raise AssertionError(f"no heads for {parallels}")


def _fits(arch: ModelArch, parallels: Sequence[ParallelConfig], implementation: Implementation) -> bool:
    try:
        for parallel in parallels:
            check_tp(arch, parallel.tp)
            check_cp(arch, parallel.tp, parallel.cp, implementation)
            check_cp(arch, 1, parallel.cp, implementation)  # --bisect measures each axis alone
    except ValueError:
        return False
    return True


def _repeats(arch: ModelArch, parallel: ParallelConfig) -> bool:
    """True if tensor or context parallel ranks share a KV head."""
    return arch.num_kv_heads < parallel.tp or arch.num_kv_heads // parallel.tp % parallel.cp != 0


def _rope(arch: ModelArch, text: Mapping[str, Any]) -> dict[str, Any]:
    key = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    given = dict(text.get(key) or {})
    if not given or any(isinstance(value, Mapping) for value in given.values()):
        return {key: given} if given else {}  # of each kind of layer its own, with no length to reach
    if arch.rope.original_max_positions is not None:
        given["original_max_position_embeddings"] = ORIGINAL_POSITIONS
    if arch.rope.factor is not None:
        given["factor"] = arch.rope.factor
    return {key: given}


def _window(arch: ModelArch, num_layers: int) -> dict[str, Any]:
    """The window in every layer, or in every second one if the user's model has layers of both kinds."""
    if arch.sliding_window is None:
        return {"sliding_window": None, "use_sliding_window": False}
    window: dict[str, Any] = {"sliding_window": SLIDING_WINDOW, "use_sliding_window": True}
    style = FAMILIES[arch.family].window
    if style is not None and style.by_layer:
        # Of layers in turn the first one slides, as gpt-oss needs it.
        slides = [all(arch.sliding_layers) or layer % 2 == 0 for layer in range(num_layers)]
        window["layer_types"] = ["sliding_attention" if sliding else "full_attention" for sliding in slides]
    return window


def _experts(arch: ModelArch, parallels: Sequence[ParallelConfig]) -> dict[str, Any]:
    """Experts that ep divides, twice top-k if the user's model has as many; one dense layer if the user's has some."""
    moe = arch.moe
    if moe is None:
        return {}
    top_k = min(moe.top_k, _MOST_ROUTES)
    groups, cuts = min(moe.groups, _MOST_GROUPS), [p.etp for p in parallels]
    if moe.shared_size:  # as wide as an expert, and tp cuts them
        cuts += [p.tp for p in parallels]
    fewest = min(moe.num_experts, max(_LEAST_EXPERTS, 2 * top_k, 2 * groups))
    return {
        "num_experts": _at_least(fewest, lcm(groups, *(p.ep for p in parallels))),
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": _at_least(_LEAST_EXPERT_COLUMNS, lcm(*cuts)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0] if moe.dense_layers else [],
        "first_k_dense_replace": 1 if moe.dense_layers else 0,
        "shared_expert_intermediate_size": _at_least(_LEAST_EXPERT_COLUMNS, lcm(*cuts)),
        "n_group": groups,
        "topk_group": groups if moe.top_groups == moe.groups else -(-groups // 2),
    }


def _latent(arch: ModelArch) -> dict[str, Any]:
    if arch.latent is None:
        return {}
    q_rank = None if arch.latent.q_rank is None else 12
    sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": HEAD_DIM, "qk_rope_head_dim": 4, "v_head_dim": 6}  # all of them different
    # transformers takes the rotated channels from head_dim.
    return {"q_lora_rank": q_rank, **sizes, "head_dim": sizes["qk_rope_head_dim"]}


def _delta(arch: ModelArch, parallels: Sequence[ParallelConfig], num_layers: int) -> dict[str, Any]:
    """Delta nets and attention in turn, with a key head for every tp and cp rank, each with as many value heads as in the user's
    model."""
    if arch.delta is None:
        return {}
    key_heads = lcm(2, *(p.tp * p.cp for p in parallels))
    return {
        "layer_types": [("full_attention", "linear_attention")[layer % 2 == 0] for layer in range(num_layers)],
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * arch.delta.value_heads // arch.delta.key_heads,
        "linear_key_head_dim": HEAD_DIM,
        "linear_value_head_dim": 6,
        "rms_norm_eps": DELTA_NORM_EPS,
    }


def _seeing(text: dict[str, Any], vision: VisionArch, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a small language model with a tower: as deep as it takes for both kinds of blocks, and features of one
    layer where the user's model has some of several."""
    if vision.tile:
        return _seeing_tiles(text, config)
    key = "rope_scaling" if "rope_scaling" in text else "rope_parameters"
    sections = {"mrope_section": [HEAD_DIM // 2 - 2, 1, 1], "mrope_interleaved": vision.interleaved}
    tower = json.loads(vision.config) | {
        "depth": 2,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": _LEAST_COLUMNS,
        "num_heads": 2,
        "out_hidden_size": HIDDEN_SIZE,
        "patch_size": PATCH,
        "window_size": 2 * vision.merge * PATCH,
        "fullatt_block_indexes": [1],
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0] if vision.deepstack else [],
    }
    named = {name: VOCAB_SIZE - 1 - place for place, name in enumerate(_IMAGE_IDS)}
    model_type = config["model_type"]
    return {
        "architectures": config["architectures"],
        "model_type": model_type,
        "tie_word_embeddings": text["tie_word_embeddings"],
        **named,
        "vision_config": {name: tower[name] for name in tower if name in json.loads(vision.config)},
        "text_config": {**text, "model_type": f"{model_type}_text", key: {"rope_type": "default"} | text.get(key, {}) | sections},
    }


def _seeing_tiles(text: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a tower that gets tiles, of two features a side."""
    sizes = {"hidden_size": HIDDEN_SIZE, "intermediate_size": _LEAST_COLUMNS, "num_hidden_layers": 2, "num_attention_heads": 2}
    sides = {"patch_size": [PATCH] * 2, "image_size": [4 * PATCH] * 2}
    return {
        **{key: value for key, value in config.items() if key not in _DROPPED},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": VOCAB_SIZE - 1,
        "image_seq_length": 4,
        "vision_config": {**config["vision_config"], **sizes, **sides},
        "text_config": {**text, "model_type": config["text_config"].get("model_type", "qwen2")},
    }


def write_images(folder: Path, vision: VisionArch) -> None:
    """Write the store of a few images of noise, which recorded samples show."""
    rng, first, index = numpy.random.default_rng(0), 0, []
    for grid in GRIDS:
        rows, cols = (side * vision.merge for side in grid)
        if vision.tile:  # so many tiles
            rows, cols = (side * vision.tile // vision.patch for side in (grid[0], 1))
        index.append((first, rows, cols))
        first += rows * cols
    pixels = rng.integers(0, 256, (first, 3 * PATCH**2), dtype=numpy.uint8)
    write_store(folder, pixels, index, merge=vision.merge, frames=vision.frames, mean=[0.5] * 3, std=[0.5] * 3)


def _at_least(least: int, multiple: int) -> int:
    return -(-least // multiple) * multiple  # rounded up to a multiple


def write_model(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    arch = arch_of(config)
    shapes = hf_tensors(arch, value_head=is_classifier(config))
    tensors = {name: _random(name, shape, generator) for name, shape in shapes.items()}
    if arch.centred_norms:  # weights are distances from 1, but those of a delta net's own norm
        tensors |= {
            name: tensor - 1.0
            for name, tensor in tensors.items()
            if "norm" in name and not name.endswith("linear_attn.norm.weight")
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if (ends := next((ends for last, ends in _OF_DELTA_NETS.items() if name.endswith(last)), None)) is not None:
        return torch.empty(shape).uniform_(*ends, generator=generator)
    if len(shape) == 1 and not name.endswith("bias"):  # a norm in any family
        # Not 1, and biases below are not 0, so that a lost gradient shows in the numbers.
        return torch.empty(shape).uniform_(0.5, 1.5, generator=generator)
    # Scaled for activations of order 1 in every layer at this width.
    return torch.empty(shape).normal_(0, 0.2, generator=generator)
