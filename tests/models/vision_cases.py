"""Small random vision-language checkpoints, pictures of coloured squares, and what transformers computes of one sample alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from megappo.data.cache import Cache
from megappo.data.images import IMAGE_BASE, PromptImages, open_images
from megappo.data.sources import open_source
from megappo.models.arch import ModelArch
from megappo.models.hf_config import arch_of, read_arch
from megappo.models.vision_families import places_of
from scripts.quickstart_images import SPECIALS, write_tokenizer

# Of ids: 256 bytes, then these.
IMAGE_TOKEN, EOS = 261, 258
_IDS: dict[str, Any] = dict(image_token_id=IMAGE_TOKEN, video_token_id=262, vision_start_token_id=259, vision_end_token_id=260)
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = dict(
    vocab_size=272,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=256,
    bos_token_id=None,
    eos_token_id=EOS,
)
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 80, 220)}


def _qwen2_5_vl() -> Any:
    # Heads of 32 channels, as vLLM's CPU kernel wants; windows of 2 x 2 features, and whole images in the last block.
    text = _TEXT | dict(hidden_size=128, rope_parameters={**_ROPE, "mrope_section": [8, 4, 4]})
    vision = dict(depth=3, hidden_size=64, intermediate_size=96, num_heads=2, patch_size=14, out_hidden_size=128)
    windows = dict(window_size=56, fullatt_block_indexes=[2], tokens_per_second=2)
    return transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision | windows,
        tie_word_embeddings=False,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        **_IDS,
    )


_QWEN3: dict[str, Any] = dict(
    text_config=_TEXT | dict(head_dim=32, rope_parameters={**_ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}),
    vision_config=dict(
        depth=4,
        hidden_size=64,
        intermediate_size=96,
        num_heads=2,
        patch_size=16,
        out_hidden_size=64,
        num_position_embeddings=64,
        deepstack_visual_indexes=[1, 2],
    ),
    **_IDS,
)


def _qwen3_vl() -> Any:
    return transformers.Qwen3VLConfig(**_QWEN3, tie_word_embeddings=True)


def _qwen3_vl_moe() -> Any:
    """Experts in every layer but the second; none of their matrices is a square."""
    sparse = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, mlp_only_layers=[1], norm_topk_prob=True)
    text = _QWEN3["text_config"] | sparse
    return transformers.Qwen3VLMoeConfig(**{**_QWEN3, "text_config": text}, tie_word_embeddings=False)


def _internvl() -> Any:
    text = transformers.Qwen2Config(**_TEXT | dict(hidden_size=128, rope_parameters=_ROPE, tie_word_embeddings=False)).to_dict()
    text["architectures"] = ["Qwen2ForCausalLM"]
    vision = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2, image_size=32, patch_size=8)
    more = dict(attention_bias=True, layer_scale_init_value=0.5)
    return transformers.InternVLConfig(
        text_config=text, vision_config=vision | more, image_token_id=IMAGE_TOKEN, image_seq_length=4, tie_word_embeddings=False
    )


KINDS = {
    "internvl": (_internvl, transformers.InternVLForConditionalGeneration, "InternVLProcessor"),
    "qwen2_5_vl": (_qwen2_5_vl, transformers.Qwen2_5_VLForConditionalGeneration, "Qwen2_5_VLProcessor"),
    "qwen3_vl": (_qwen3_vl, transformers.Qwen3VLForConditionalGeneration, "Qwen3VLProcessor"),
    "qwen3_vl_moe": (_qwen3_vl_moe, transformers.Qwen3VLMoeForConditionalGeneration, "Qwen3VLProcessor"),
}
TOWERS = ("qwen2_5_vl", "qwen3_vl")
"""A kind for each tower: those of Qwen3-VL are the same with experts."""


def vision_arch(kind: str, **tower: Any) -> ModelArch:
    """Architecture of a kind with other sizes of its tower."""
    config = KINDS[kind][0]().to_dict()
    config["vision_config"] |= tower
    return arch_of({**config, "architectures": [KINDS[kind][1].__name__]})


def write_vision_checkpoint(path: Path, kind: str) -> None:
    """Write weights, tokenizer of bytes, and processor; no weight is at a value that would hide a mistake."""
    make, model_class, processor = KINDS[kind]
    config = make()
    torch.manual_seed(0)
    model = model_class(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale, shift = (0.1, 0.0) if parameter.dim() > 1 else (0.2, float("norm" in name or "ln_q" in name or "lambda" in name))
            parameter.copy_(torch.randn_like(parameter) * scale + shift)
    model.save_pretrained(path)
    if hasattr(config.text_config, "num_experts"):
        as_published(path)
    specials = SPECIALS
    if kind == "internvl":
        named = {"vision_start": "<img>", "vision_end": "</img>", "image_pad": "<IMG_CONTEXT>", "video_pad": "<video>"}
        specials = tuple(named.get(one.strip("<|>"), one) for one in SPECIALS)
    write_tokenizer(path, _TEMPLATE, specials)
    write_processor(path, processor, config.vision_config.patch_size)


def as_published(path: Path) -> None:
    """Turn the experts' stacks to [experts, in, out], as files on the hub have them and vLLM reads them. transformers reads both
    ways and writes the other one."""
    file = path / "model.safetensors"
    tensors = {name: one.mT.contiguous() if ".experts." in name else one for name, one in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def as_classifier(path: Path) -> None:
    """Turn the checkpoint into a reward model: another architecture, and a head of one row in place of the output projection."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    named = [config["architectures"][0].replace("ConditionalGeneration", "SequenceClassification")]
    file.write_text(json.dumps(config | {"architectures": named, "id2label": {"0": "VALUE"}, "label2id": {"VALUE": 0}}))
    weights = path / "model.safetensors"
    tensors = {name: one for name, one in load_file(weights).items() if name != "lm_head.weight"}
    hidden = config["text_config"]["hidden_size"]
    tensors["score.weight"] = torch.randn(1, hidden, generator=torch.Generator().manual_seed(3)) / hidden**0.5
    save_file(tensors, weights, metadata={"format": "pt"})


def write_processor(path: Path, processor: str, patch: Any) -> None:
    side = 2 * (patch[0] if isinstance(patch, (list, tuple)) else patch)
    if processor == "InternVLProcessor":
        tiles = {
            "image_processor_type": "GotOcr2ImageProcessor",
            "processor_class": processor,
            "crop_to_patches": False,
            "min_patches": 1,
            "max_patches": 4,
            "size": {"height": 32, "width": 32},
            "image_mean": [0.5, 0.4, 0.6],
            "image_std": [0.5, 0.3, 0.4],
        }
        (path / "preprocessor_config.json").write_text(json.dumps(tiles))
        return
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": processor,
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": side**2, "longest_edge": 64 * side**2},
        "image_mean": [0.5, 0.4, 0.6],
        "image_std": [0.5, 0.3, 0.4],
    }
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    video = settings | {"video_processor_type": processor.replace("_5", "").replace("VLProcessor", "VLVideoProcessor")}
    (path / "video_preprocessor_config.json").write_text(json.dumps(video))


def squares(counts: dict[str, int], size: tuple[int, int], seed: int = 0, cell: int = 16) -> Image.Image:
    """Picture with so many squares of each colour, in cells of a grid."""
    width, height = size
    cells = [(x, y) for x in range(0, width - cell + 1, cell) for y in range(0, height - cell + 1, cell)]
    numpy.random.default_rng(seed).shuffle(cells)
    image, places = Image.new("RGB", size, (245, 245, 240)), iter(cells)
    draw = ImageDraw.Draw(image)
    for colour, count in counts.items():
        for _ in range(count):
            x, y = next(places)
            draw.rectangle([x + 2, y + 2, x + cell - 3, y + cell - 3], fill=COLOURS[colour])
    return image


PICTURES: tuple[tuple[dict[str, int], tuple[int, int]], ...] = (
    ({"red": 3}, (64, 64)),
    ({"green": 1}, (96, 64)),
    ({"blue": 4}, (64, 160)),
    ({"red": 1}, (128, 128)),
)
# Question and the numbers of its pictures: one, none, two, a larger one, and the first one again.
QUESTIONS = (("How many?<image>", [0]), ("None.", []), ("Two <image><image>", [1, 2]), ("<image>One", [3]), ("Again <image>", [0]))


def write_questions(folder: Path) -> Path:
    """Write the pictures and questions.jsonl."""
    for number, (counts, size) in enumerate(PICTURES):
        squares(counts, size, seed=number).save(folder / f"{number}.png")
    lines = [{"prompt": text, "answer": "1", "images": [f"{n}.png" for n in numbers]} for text, numbers in QUESTIONS]
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def images_of(path: Path, file: Path, cache: Path) -> PromptImages:
    return open_images([open_source(str(file))], "images", None, places_of(path, read_arch(path)), None, Cache(cache))


@dataclass(frozen=True)
class Sample:
    """coded: ids as a run has them. ids: with the checkpoint's image token instead. images: their numbers."""

    coded: list[int]
    ids: list[int]
    images: list[int]

    @classmethod
    def of(cls, coded: Sequence[int], images: Sequence[int]) -> Sample:
        return cls(list(coded), [IMAGE_TOKEN if one >= IMAGE_BASE else one for one in coded], list(images))


def inputs_of(sample: Sample, images: PromptImages) -> dict[str, Any]:
    """Arguments of transformers' class. A sampled image token is one of text to both, so it is none of `mm_token_type_ids`."""
    ids = torch.tensor([sample.ids])
    if not sample.images:
        return {"input_ids": ids, "use_cache": False}
    store = images.store
    if store.frames == 1:
        return {"input_ids": ids, "pixel_values": _tiles_of(sample, images), "use_cache": False}
    scale, shift = (torch.tensor(one).view(1, 3, 1, 1) for one in store.scaling)
    patches = torch.from_numpy(store.patches(sample.images))
    pixels = patches.view(len(patches), 3, 1, -1).repeat(1, 1, store.frames, 1) * scale + shift
    return {
        "input_ids": ids,
        "pixel_values": pixels.flatten(1),
        "image_grid_thw": torch.tensor([(1, *store.grid(one)) for one in sample.images]),
        "mm_token_type_ids": torch.tensor([[int(one >= IMAGE_BASE) for one in sample.coded]]),
        "use_cache": False,
    }


def _tiles_of(sample: Sample, images: PromptImages) -> Tensor:
    """Tiles as transformers' processor makes them of the files."""
    (folder,) = images.folders.values()
    assert folder is not None
    settings = json.loads((folder / "internvl/preprocessor_config.json").read_text())
    processor = GotOcr2ImageProcessorPil(**settings | {"crop_to_patches": True})
    pictures = [Image.open(folder / f"{number}.png").convert("RGB") for number in sample.images]
    return torch.as_tensor(processor(images=pictures, return_tensors="np")["pixel_values"])


def logprobs_alone(model: Any, sample: Sample, images: PromptImages) -> Tensor:
    """Log-probs of the tokens after the first one, [L - 1]; 0 of features."""
    logits = model(**inputs_of(sample, images)).logits[0].float()
    found = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(sample.ids)[1:, None])[:, 0]
    return torch.where(torch.tensor(sample.coded[1:]) < IMAGE_BASE, found, 0.0)


def text_only_name(name: str) -> str:
    """Name of a parameter of transformers' class in the weight map."""
    found = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    return re.sub(r"^model\.(vision_tower|multi_modal_projector)\.", r"visual.\1.", found)


def text_only(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of transformers' class by their names in the weight map, which has one for each matrix of an expert."""
    found: dict[str, Tensor] = {}
    for name, tensor in ((text_only_name(name), tensor) for name, tensor in tensors.items()):
        before, experts, kind = name.partition(".experts.")
        for number, matrix in enumerate(tensor if experts else ()):
            parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2))) if kind == "gate_up_proj" else {kind: matrix}
            found |= {f"{before}.experts.{number}.{part}.weight": one for part, one in parts.items()}
        if not experts:
            found[name] = tensor
    return found
