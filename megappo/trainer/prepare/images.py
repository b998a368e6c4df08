"""The images of a run: what its configuration and models have to be for them, and the store that all ranks map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megappo.config.errors import ConfigError, problem
from megappo.config.evaluations import evaluation_sets
from megappo.config.layout_checks import reads_trajectories
from megappo.config.role_sections import section_of
from megappo.config.schema import DataConfig, TrainConfig
from megappo.config.supervised import AnyConfig, PicturedDataConfig
from megappo.data.cache import Cache
from megappo.data.image_processor import PROCESSOR
from megappo.data.images import PromptImages, open_images
from megappo.data.sources import open_sources
from megappo.models.arch import ModelArch
from megappo.models.hf_config import arch_for
from megappo.models.vision_families import TEXT_ALONE, VISION_FAMILIES, places_of
from megappo.runtime.messages import parse_object
from megappo.trainer.prepare.layouts import model_paths


def images_of_run(config: AnyConfig, cache: Cache, *, trains: bool = True) -> PromptImages | None:
    """Open the images of all prompts of a run; None if neither they nor an environment have some. trains: False for evaluations
    alone. ValueError, one line, as `check_images` and `open_images`."""
    if _key_of_images(config) is None:
        return None
    data, shown = config.data, config.rollout.shown_images if isinstance(config, TrainConfig) else 0
    assert isinstance(data, DataConfig | PicturedDataConfig)
    if isinstance(config, TrainConfig):
        held_out = [one.data for one in evaluation_sets(config).values()]
    else:
        held_out = list(config.held_out.values())
    sources = map(open_sources, [*([data.train] if trains else []), *held_out])
    _, model = model_paths(config)[config.learner]
    arch = arch_for(model, section_of(config, config.learner).engine)
    check_images(config, {config.learner: arch})
    places = places_of(model, arch)
    how = data.image_root, places, data.max_image_pixels, cache
    return open_images(sources, data.image_key, *how, most_shown=shown)


def _key_of_images(config: AnyConfig) -> tuple[str, Any] | None:
    """Return the key by which a run has images, and its value; None if it has none."""
    if isinstance(config.data, DataConfig | PicturedDataConfig) and config.data.image_key is not None:
        return "data.image_key", config.data.image_key
    if isinstance(config, TrainConfig) and config.rollout.shown_images:
        return "rollout.environment.images", config.rollout.shown_images
    return None


def image_notes(images: PromptImages | None) -> Iterator[str]:
    """Yield a line on the images of a run, if it has some."""
    if images is not None and images.key is not None:
        sizes = [images.store.num_tokens(one) for one in range(len(images.store))]
        yield (
            f"data.image_key={images.key}: {len(sizes):,} images of {min(sizes):,} to {max(sizes):,} tokens, "
            f"{images.store.num_bytes / 2**20:,.1f} MiB of pixels in the cache"
        )


def check_images(config: AnyConfig, archs: Mapping[str, ModelArch]) -> None:
    """ConfigError, one line, for a model without a tower, for towers of other patches, and for keys that do not go with images.
    archs: by role."""
    if (found := _key_of_images(config)) is None:
        return
    key, value = found
    if isinstance(config, TrainConfig):
        environment = config.rollout.environment
        compaction = None if environment is None else environment.compaction
        keeps = compaction is not None and compaction.keep_first is not None
        beside = (
            (keeps, "rollout.environment.compaction.keep_first, which may cut one,"),
            (reads_trajectories(config), "critic.warmup.trajectories, whose files hold no pixels,"),
        )
        for is_set, what in beside:
            if is_set:
                raise ConfigError(problem(key, value, f"images with {what} are not there; remove one of the two"))
    first, paths = archs[config.learner].vision, model_paths(config)
    for role, arch in archs.items():
        named, path = paths[role]
        if arch.vision is None or first is None:
            towers = dict.fromkeys(family.architecture for family in VISION_FAMILIES.values())
            why = f" here: {reason}" if (reason := TEXT_ALONE.get(arch.architecture)) else ""
            others = f"remove it, or take a model with a tower: {', '.join(towers)}"
            fix = f"{named} {path} ({arch.architecture}) reads text alone{why}; {others}"
            raise ConfigError(problem(key, value, fix))
        for name in ("patch", "merge", "frames", "tile"):
            if (theirs := getattr(arch.vision, name)) != (ours := getattr(first, name)):
                fix = f"its tower differs from that of {config.learner} ({name} {theirs}, not {ours}): both see the same patches"
                raise ConfigError(problem(named, path, fix))
        for name in ("image_mean", "image_std"):
            theirs, ours = (_processor_key(folder, name) for folder in (path, paths[config.learner][1]))
            if None not in (theirs, ours) and theirs != ours:
                fix = f"its preprocessor_config.json has {name} {theirs}, that of {config.learner} {ours}: both see the same pixels"
                raise ConfigError(problem(named, path, fix))


def _processor_key(folder: str, name: str) -> Any:
    file = Path(folder) / PROCESSOR
    return parse_object(file.read_bytes(), str(file)).get(name) if file.is_file() else None
