"""Manifest of a checkpoint: every file with its size and SHA-256, and the facts about the run that wrote it.

The manifest is written last, so a directory without one is not a checkpoint. It detects damage, not forgery: whoever can write
the files can write the manifest too. Megatron-core itself loads a bit-flipped shard without noticing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 (hex) of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """files: path relative to the checkpoint directory -> entry. facts: see `identity.py`."""

    step: int
    world_size: int
    model_only: bool
    facts: Mapping[str, Any]
    files: Mapping[str, FileEntry]

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


def fingerprint_file(path: Path, *, sync: bool = False) -> FileEntry:
    """Hash a file; `sync` also forces its bytes to the disk. OSError if it is missing."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
        if sync:
            os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


def write_synced(path: Path, content: str) -> None:
    """Write a small text file and force it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Force the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_files(directory: Path) -> list[str]:
    """Relative paths of all files below, sorted, without the manifest itself."""
    found = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    content = {"format": FORMAT, **asdict(manifest)}
    write_synced(directory / MANIFEST, json.dumps({**content, "sha256": _digest(content)}, indent=1, sort_keys=True))


def read_manifest(directory: Path) -> Manifest:
    """Read a manifest. ValueError if it is missing, damaged or of another format."""
    try:
        content = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        digest = content.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{directory.name}/{MANIFEST} is missing or not readable ({type(error).__name__})") from None
    if digest != _digest(content):
        raise ValueError(f"{directory.name}/{MANIFEST} does not match its own checksum")
    if content.pop("format") != FORMAT:
        raise ValueError(f"{directory.name} has another checkpoint format than {FORMAT}; load it with the megappo that wrote it")
    files = {name: FileEntry(**entry) for name, entry in content.pop("files").items()}
    return Manifest(files=files, **content)


def find_wrong_size(directory: Path, manifest: Manifest) -> str | None:
    """First listed file that is missing, is a link, or has another size; None if all are right."""
    for name, entry in sorted(manifest.files.items()):
        path = directory / name
        if path.is_symlink() or not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry.bytes:
            return f"{name} has {path.stat().st_size} bytes instead of {entry.bytes}"
    return None


def find_wrong_content(directory: Path, manifest: Manifest, names: list[str]) -> str | None:
    """First of `names` whose SHA-256 is not the manifest's; None if all are right."""
    for name in names:
        try:
            found = fingerprint_file(directory / name)
        except OSError as error:
            return f"{name} is not readable ({error.strerror})"
        if found != manifest.files[name]:
            return f"{name} does not match its SHA-256"
    return None


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
