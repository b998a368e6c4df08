"""Names of the files in a checkpoint, and which of them every one holds. Imports no torch."""

from __future__ import annotations

from collections import defaultdict

from megappo.checkpoint.errors import UnsafeCheckpoint
from megappo.checkpoint.manifest import Manifest

STATE = "state.json"
"""State of the trainer and its components."""
_ENGINES = "megatron"
_OF_A_MODEL = frozenset({".metadata", "common.pt", "metadata.json"})  # beside its shards
_SHARD = ".distcp"


def rng_file(rank: int) -> str:
    return f"rng-{rank:05d}.safetensors"


def engine_folder(name: str) -> str:
    """Folder of the shards of one engine."""
    return f"{_ENGINES}/{name}"


def models_of(manifest: Manifest) -> frozenset[str]:
    """Names of the models that a checkpoint holds."""
    return frozenset(_files_of_models(manifest))


def _files_of_models(manifest: Manifest) -> dict[str, set[str]]:
    models: dict[str, set[str]] = defaultdict(set)
    for name in manifest.files:
        folder, _, rest = name.partition("/")
        if folder == _ENGINES:
            model, _, file = rest.partition("/")
            models[model].add(file)
    return models


def require_complete(manifest: Manifest) -> None:
    """UnsafeCheckpoint if the manifest leaves out a file that every checkpoint has: nobody would notice that it was changed."""
    models = _files_of_models(manifest)
    wanted = set() if manifest.model_only else {STATE}
    if not manifest.model_only and manifest.world_size <= len(manifest.files):
        wanted |= {rng_file(rank) for rank in range(manifest.world_size)}
    elif not manifest.model_only:  # no list of so many ranks is made: the number may be anything
        wanted.add(rng_file(manifest.world_size - 1))
    missing = wanted - manifest.files.keys()
    for model, files in models.items():
        missing |= {f"{engine_folder(model)}/{name}" for name in _OF_A_MODEL - files}
        if not any(file.endswith(_SHARD) for file in files):
            missing.add(f"{engine_folder(model)}/*{_SHARD}")
    if not models:
        missing.add(f"{_ENGINES}/")
    if missing:
        raise UnsafeCheckpoint(f"step-{manifest.step}: its manifest leaves out {min(missing)}; the file is not from megappo")
