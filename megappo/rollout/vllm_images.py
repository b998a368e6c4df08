"""Images for vLLM: the same bytes as the trainer's towers get, already in their places among the tokens.

vLLM's own processing of images never runs: its model normalises the bytes on the device, as `models/vision.py` does; tiles come
normalised.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy
import torch

from megappo.data.images import IMAGE_BASE, MOST_IMAGES, ImageStore
from megappo.models.arch import VisionArch
from megappo.models.vision import pixels_of, spans_of, tiles_of
from megappo.rollout.types import Ids


def image_options(path: str, vision: VisionArch, shown: int) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` that a vision-language model in this directory adds. shown: most images that an
    environment adds to a prompt's."""
    return {
        # vLLM asks for the tokenizer of such a model, which reads no prompt.
        "tokenizer": path,
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"image": MOST_IMAGES + shown, "video": 0},
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": not vision.tile,
        # It would process pictures of its own.
        "skip_mm_profiling": True,
    }


def register_text(architecture: str) -> None:
    """Give vLLM the class of a language model whose module imports the processors of a vision-language model too (Qwen3.5)."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(architecture, _served(architecture))


def _served(architecture: str) -> Any:
    from vllm import ModelRegistry

    known: Any = ModelRegistry.models[architecture]
    with _torchvision_named():
        return known.load_model_cls()


def register_vision(architecture: str, images: ImageStore | None) -> None:
    """Give vLLM the class of a model, which it would otherwise import in a process of its own to look at, with the sizes of a run's
    images in place of those of the processor, which it would build only to ask for them."""
    from vllm import ModelRegistry

    served = _served(architecture)
    most = 1 if images is None else images.most_tokens

    class Info(served._processor_factory.info):
        def get_mm_max_tokens_per_item(self, *_: object, **__: object) -> dict[str, int]:
            return {"image": most, "video": 1}

    served._processor_factory = replace(served._processor_factory, info=Info)
    ModelRegistry.register_model(architecture, served)


class _Absent(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        error = AttributeError if name.startswith("__") else RuntimeError
        raise error(f"{self.__name__}.{name}: torchvision is not installed")


@contextmanager
def _torchvision_named() -> Iterator[None]:
    """Let modules import torchvision's transforms if it is missing: vLLM's classes import transformers' processors, which do, and
    megappo calls none of them. The package index has no build of it for a CPU torch."""
    if find_spec("torchvision") is not None:
        yield
        return
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")
    modules = {name: _Absent(name) for name in names}
    for name in names[1:]:
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, modules[name])
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def restore_normalisation(worker: Any) -> None:
    """Compute the constants that normalise pixels again, if the model has some: dummy weights fill them too, and no push comes to
    them."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fusion.mm_input_norm import build_mm_input_norm

    if not hasattr(worker.get_model(), "visual"):
        return
    with set_current_vllm_config(worker.vllm_config), torch.inference_mode():
        fresh = build_mm_input_norm(worker.vllm_config.model_config)
        for name, buffer in worker.get_model().visual.input_norm.named_buffers():
            buffer.copy_(fresh.get_buffer(name))


def inputs_with_images(tokens: Ids, vision: VisionArch, images: ImageStore | None, salt: str) -> Any:
    """Return vLLM's processed inputs of a prompt. salt: of the weights' version, so that neither a cached prefix nor a tower's
    features of older weights are found again."""
    from vllm.inputs import mm_input, tokens_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    found = spans_of(torch.from_numpy(tokens), images)
    if not found:
        return tokens_input(tokens.tolist(), cache_salt=salt)
    assert images is not None
    numbers = [span.image for span in found]
    of_each, kept = MultiModalFieldConfig.flat_from_sizes, {"keep_on_cpu": True}
    if vision.tile:
        tiles = tiles_of(pixels_of(images, numbers, torch.device("cpu"), torch.float32), vision)
        counts = torch.tensor([images.grid(one)[0] for one in numbers]) * vision.patch // vision.tile
        processed: Any = {"pixel_values": tiles, "image_num_patches": counts, "image_token_id": torch.tensor(vision.image_token)}
        fields = {
            "pixel_values": of_each("image", counts),
            "image_num_patches": MultiModalFieldConfig.batched("image", **kept),
            "image_token_id": MultiModalFieldConfig.shared("image", len(numbers), **kept),
        }
    else:
        grids = torch.tensor([(1, *images.grid(one)) for one in numbers])
        patches = torch.from_numpy(images.patches(numbers))
        pixels = patches.view(len(patches), 3, 1, -1).expand(-1, -1, images.frames, -1).reshape(len(patches), -1)
        processed = {"pixel_values": pixels, "image_grid_thw": grids}
        fields = {
            "pixel_values": of_each("image", grids.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image", **kept),
        }
    items = MultiModalKwargsItems.from_hf_inputs(processed, fields)
    words = numpy.where(tokens >= IMAGE_BASE, vision.image_token, tokens).tolist()
    hashes = [f"{salt}:{images.content(one)}" for one in numbers]
    places = [PlaceholderRange(offset=span.start, length=span.end - span.start) for span in found]
    return mm_input(words, items, {"image": hashes}, {"image": places}, cache_salt=salt)
