"""Fetches copies of checkpoints from other storage (`remote.py`) and compares them with their manifest. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megappo.checkpoint.errors import DamagedCheckpoint, RefusedCheckpoint
from megappo.checkpoint.manifest import MANIFEST, Manifest, find_wrong_content, find_wrong_size, read_manifest, require_complete
from megappo.checkpoint.remote import storage_of
from megappo.runtime.messages import first_line

_STEP = re.compile(r"step-(\d+)")


def list_copies(url: str) -> list[int]:
    """List the steps of the complete copies below a URL, newest first. ValueError, one line, if the storage cannot be read."""
    storage, root = storage_of(url)
    try:
        names = (
            [str(path).rstrip("/").rpartition("/")[2] for path in storage.ls(root, detail=False)] if storage.exists(root) else []
        )
        steps = [int(found[1]) for name in names if (found := _STEP.fullmatch(name))]
        return sorted((step for step in steps if storage.exists(f"{root}/step-{step}/{MANIFEST}")), reverse=True)
    except Exception as error:  # the storage's own exceptions, as in `remote.py`
        raise ValueError(f"cannot be read: {first_line(error)}") from error


def fetch_manifest(url: str, step: int, place: Path) -> Manifest:
    """Fetch the manifest of a copy into the directory `place`. Errors as `manifest.read_manifest`; ValueError as `list_copies`."""
    storage, root = storage_of(url)
    _get(storage, f"{root}/step-{step}", MANIFEST, place)
    manifest = read_manifest(place)
    if manifest.step != step:
        raise RefusedCheckpoint(f"{url}/step-{step}: its manifest is that of step {manifest.step}")
    require_complete(manifest)
    return manifest


def fetch_files(url: str, manifest: Manifest, place: Path) -> None:
    """Fetch the files of a copy next to its manifest. DamagedCheckpoint if one is missing or is not what was saved."""
    storage, root = storage_of(url)
    for name in sorted(manifest.files):
        _get(storage, f"{root}/step-{manifest.step}", name, place)
    wrong = find_wrong_size(place, manifest) or find_wrong_content(place, manifest, sorted(manifest.files))
    if wrong:
        raise DamagedCheckpoint(wrong)


def _get(storage: Any, there: str, name: str, place: Path) -> None:
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    try:
        storage.get_file(f"{there}/{name}", str(place / name))
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{name} is missing") from None
    except Exception as error:  # as above
        raise ValueError(f"{there}/{name} cannot be read: {first_line(error)}") from error
