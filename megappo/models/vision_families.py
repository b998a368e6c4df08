"""Vision-language architectures that megappo trains: which family the language model is of, and the sizes of the tower.

Their language models are those of `families/`, which know nothing of images. `vision.py` computes with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megappo.data.image_processor import Places
from megappo.models.arch import ModelArch, VisionArch

TOWER = "visual."
"""Beginning of the names of a tower's tensors."""
_PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
# Sections of other modalities, and what transformers' older files write at the top level beside the language model's keys.
_NOT_OF_TEXT = ("vision_config", "text_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")

_NOT_ONE_MODULE = ("vision_tower.", "multi_modal_projector.")
"""Beginnings of names of a tower that is no module of its own in transformers' class."""


@dataclass(frozen=True)
class VisionFamily:
    """A vision-language architecture of transformers."""

    architecture: str
    language: str
    """Family of the language model; of several, the one of a file that does not name it."""
    tower: str
    """model_type of the tower's config."""
    interleaved: bool = False
    """Default of mrope_interleaved."""
    place: str = _PLACE
    """Text of an image in a prompt, with one image token."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys of vision_config that transformers before 5 leaves out of the file where they have these values."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of text_config that vLLM reads and whose values transformers takes for granted."""
    tied_inside: bool = False
    """tie_word_embeddings counts in text_config too; otherwise, for transformers and vLLM, at the top level alone."""
    languages: tuple[str, ...] = ()
    """Families that text_config.model_type may name."""
    own: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """config.json, with `defaults` in its vision_config -> settings of a tower that vision_config alone does not describe, its
    sizes under the names of Qwen's."""
    stacked: bool = False
    """The checkpoint has a tensor [experts, in, out] for gate and up, side by side, and one for down, of all experts of a layer."""

    @property
    def classifier(self) -> str:
        """Architecture of a reward model: the same tensors with `score.weight` in place of the output projection. transformers has
        no such class; vLLM takes the name for the model with a head that classifies."""
        return self.architecture.replace("ConditionalGeneration", "SequenceClassification")


def _internvl_tower(config: Mapping[str, Any]) -> dict[str, Any]:
    vision, text = config["vision_config"], config["text_config"]
    for key, value in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "default"), ("downsample_ratio", 0.5)):
        if config.get(key, value) != value:
            raise ValueError(
                f"config.json of an InternVL has {key} {json.dumps(config[key])}; only {json.dumps(value)} is supported"
            )
    for key, value in (("use_mask_token", False), ("use_absolute_position_embeddings", True)):
        if vision[key] != value:
            raise ValueError(
                f"config.json of an InternVL has vision_config.{key} {json.dumps(vision[key])}; only the other is supported"
            )
    (side,), (patch,) = ({*one} if isinstance(one, list | tuple) else {one} for one in (vision["image_size"], vision["patch_size"]))
    return {
        **vision,
        "depth": vision["num_hidden_layers"],
        "num_heads": vision["num_attention_heads"],
        "in_channels": vision["num_channels"],
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "tile": side,
        "out_hidden_size": text["hidden_size"],
        "projector_hidden_act": config.get("projector_hidden_act", "gelu"),
    }


_INTERNVL: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "attention_bias": False,
    "use_qk_norm": False,
    "intermediate_size": 4096,
    "norm_type": "layer_norm",
    "image_size": 448,
    "patch_size": 14,
    "num_channels": 3,
    "use_mask_token": False,
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
}
_QWEN2_5_VL = {
    "depth": 32,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_ALL = (
    VisionFamily("Qwen2_5_VLForConditionalGeneration", "qwen2", "qwen2_5_vl", defaults=_QWEN2_5_VL, tied_inside=True),
    VisionFamily("Qwen3VLForConditionalGeneration", "qwen3", "qwen3_vl", interleaved=True),
    VisionFamily(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_moe",
        "qwen3_vl_moe",
        interleaved=True,
        fixed={"norm_topk_prob": True},
        stacked=True,
    ),
    VisionFamily(
        "InternVLForConditionalGeneration",
        "qwen2",
        "internvl",
        place="<img><IMG_CONTEXT></img>",
        defaults=_INTERNVL,
        tied_inside=True,
        languages=("qwen2", "qwen3"),
        own=_internvl_tower,
    ),
)
TEXT_ALONE = {
    "Gemma3ForConditionalGeneration": "tokens of its images see those behind them, and packed sequences no mask but the causal one"
}
"""Architecture with a tower whose language model alone is trained -> the reason."""
VISION_FAMILIES = {name: family for family in _ALL for name in (family.architecture, family.classifier)}
"""Architecture of a checkpoint, a reward model's too -> its family."""


def places_of(path: str | Path, arch: ModelArch) -> Places:
    """Return where images stand in the prompts of a vision-language checkpoint directory."""
    assert arch.vision is not None, "a model without a tower is refused"
    vision = arch.vision
    place = VISION_FAMILIES[arch.architecture].place
    return Places(Path(path), place, vision.image_token, vision.patch, vision.merge, vision.frames, vision.tile)


def language_of(config: Mapping[str, Any], family: VisionFamily) -> str:
    """Return the family of the language model. ValueError for one that this architecture is not trained with."""
    name = (config.get("text_config") or {}).get("model_type", family.language) if family.languages else family.language
    if family.languages and name not in family.languages:
        supported = ", ".join(family.languages)
        raise ValueError(f"{family.architecture} with text_config.model_type {name!r}: supported are {supported}")
    return name


def language_config(config: Mapping[str, Any], family: VisionFamily) -> dict[str, Any]:
    """Return the language model's keys of a vision-language config.json, its rotary embedding as that of plain positions. Files of
    Qwen2.5-VL before transformers 5 have them at the top level."""
    text = config.get("text_config")
    found = dict(text) if isinstance(text, Mapping) else {key: value for key, value in config.items() if key not in _NOT_OF_TEXT}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := found.get(key), Mapping):
            plain = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
            found[key] = {name: "default" if value == "mrope" else value for name, value in plain.items()}
    inside = family.tied_inside and found.get("tie_word_embeddings")
    found["tie_word_embeddings"] = bool(config.get("tie_word_embeddings") or inside)
    return found


def read_vision(config: Mapping[str, Any], family: VisionFamily) -> VisionArch:
    """Read the tower of a vision-language config.json. ValueError, one line, for a key that is missing or not supported."""
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    for key, value in family.fixed.items():
        if text.get(key) != value:
            same = f"{json.dumps(text.get(key))}: transformers computes {json.dumps(value)} and vLLM what the key says"
            raise ValueError(f"config.json of a {family.architecture} has text_config.{key} {same}; set it to {json.dumps(value)}")
    try:
        own = {**family.defaults, **config["vision_config"]}
        own = {**(own if family.own is None else family.own({**config, "vision_config": own})), "model_type": family.tower}
        sections = tuple(rope["mrope_section"]) if family.own is None else ()
        vision = VisionArch(
            config=json.dumps(own, sort_keys=True),
            tensors=(),
            image_token=config["image_token_id"],
            patch=own["patch_size"],
            merge=own["spatial_merge_size"],
            frames=own["temporal_patch_size"],
            sections=sections,
            interleaved=bool(rope.get("mrope_interleaved", family.interleaved)),
            deepstack=len(own.get("deepstack_visual_indexes") or ()),
            tile=own.get("tile", 0),
        )
        tower_shape(vision)  # transformers has defaults for what a file lacks, the plan has none
    except KeyError as error:
        raise ValueError(f"config.json of a {family.architecture} has no {error.args[0]}, which its tower needs") from None
    return replace(vision, tensors=_tensors_of(vision))


@cache
def _tensors_of(vision: VisionArch) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Read names and shapes of a tower's tensors from transformers' own class, without memory."""
    import torch

    from megappo.models.vision import tower_of  # torch and transformers, which text-only models do without

    tower = tower_of(vision, torch.float32, torch.device("meta"))
    return tuple((TOWER + name, tuple(parameter.shape)) for name, parameter in tower.named_parameters())


class TowerShape(NamedTuple):
    """Sizes of a tower that decide its operations and its memory."""

    hidden: int
    inner: int
    """Columns of a block's MLP."""
    depth: int
    heads: int
    pixels: int
    """Numbers of a patch."""
    gated: bool
    """MLPs have a gate, and norms of blocks are RMSNorms; else they are plain, and LayerNorms."""
    window: int | None
    """Features on a side of the squares in which most blocks attend; None: every block attends to the whole image."""
    whole: int
    """Blocks that attend to the whole image."""


@cache
def tower_shape(vision: VisionArch) -> TowerShape:
    """Read the sizes of a tower."""
    config, window = json.loads(vision.config), None
    depth = whole = config["depth"]
    if side := config.get("window_size"):
        window, whole = side // vision.merge // vision.patch, len(config["fullatt_block_indexes"])
    pixels = config.get("in_channels", 3) * vision.frames * vision.patch**2
    gated = any(name.endswith("mlp.gate_proj.weight") for name, _ in vision.tensors)
    return TowerShape(config["hidden_size"], config["intermediate_size"], depth, config["num_heads"], pixels, gated, window, whole)


def checkpoint_name(name: str) -> str:
    """Return a tensor's name in a vision-language checkpoint as transformers 5 writes it and vLLM reads it."""
    if name.startswith(TOWER):
        inside = name.removeprefix(TOWER)
        return f"model.{inside if inside.startswith(_NOT_ONE_MODULE) else name}"
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
