"""Facts about a run in its checkpoints: some must match on resume, the others are only recorded.

A resumed run with another reference model or tokenizer would train towards something else without any error; layouts and versions
may change.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megappo.checkpoint.manifest import Manifest

_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16
_WHOLE_FILE_BYTES = 1 << 20  # files up to this size are hashed whole


MUST_MATCH = ("reference", "tokenizer")
"""Keys of the facts that a resumed run must share with its checkpoint; all other keys are only recorded."""


def require_same_run(manifest: Manifest, facts: Mapping[str, Any], name: str) -> None:
    """ValueError, in one line, if a fact that must match does not."""
    for key in MUST_MATCH:
        saved, now = manifest.facts.get(key), facts.get(key)
        if _identity(saved) != _identity(now):
            raise ValueError(
                f"{name} was written with {key} {saved!r}, this run has {now!r}; "
                "resume with the same one, or start a new run in another directory"
            )


def _identity(fact: Any) -> Any:
    return fact["sha256"] if isinstance(fact, Mapping) else fact  # the path may have moved


def identity_of_model(directory: str | Path) -> dict[str, str]:
    """Fact about a model that is loaded from its own source: path (recorded) and fingerprint (compared)."""
    return {"path": str(directory), "sha256": fingerprint_model(directory)}


def fingerprint_model(directory: str | Path) -> str:
    """Fingerprint a Hugging Face checkpoint directory, cheaply for any size: SHA-256 of config.json and samples of its weights.

    Per weight file: size, the first MiB and 16 blocks of 64 KiB spread over the rest. The path does not enter. ValueError if the
    directory holds no config.json.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has no config.json; a Hugging Face checkpoint directory is needed")
    digest = hashlib.sha256()
    files = [path for path in directory.iterdir() if path.suffix == ".safetensors" or path.name == "config.json"]
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_WHOLE_FILE_BYTES))  # of safetensors: the header with names and shapes
            for sample in range(_SAMPLES if size > _WHOLE_FILE_BYTES else 0):
                file.seek(_WHOLE_FILE_BYTES + (size - _WHOLE_FILE_BYTES) * sample // _SAMPLES, os.SEEK_SET)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
