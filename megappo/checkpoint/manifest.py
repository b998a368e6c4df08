"""Manifest of a checkpoint: every file with its size and hash, and the facts about the run that wrote it.

The manifest is written last, so a directory without one is not a checkpoint. It detects damage, not forgery: whoever can write
the files can write the manifest too, unless MEGAPPO_CHECKPOINT_KEY is set (`signature.py`). Megatron-core itself loads a
bit-flipped shard without noticing.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megappo.checkpoint.errors import DamagedCheckpoint, RefusedCheckpoint, UnsafeCheckpoint, unreadable
from megappo.checkpoint.hashing import SCHEMES, cores_of_rank
from megappo.checkpoint.signature import check_signature, sign

MANIFEST = "manifest.json"
FORMAT = 3
BEST = "best"
"""Fact of a checkpoint: {step, metric, mode, value} of the best step of its run so far (`trainer.keep_best`)."""


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and hash (hex; see `hashing.py`) of one file."""

    bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """files: path relative to the checkpoint directory -> entry. facts: see `identity.py`. format: says how files are hashed."""

    step: int
    world_size: int
    model_only: bool
    facts: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    format: int = FORMAT

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    @property
    def best_step(self) -> int | None:
        """Step of the best checkpoint when this one was made; None if the run chooses none."""
        best = self.facts.get(BEST)
        return best["step"] if best else None


def fingerprint_file(path: Path, format: int = FORMAT) -> FileEntry:
    """Hash a file with all cores of this rank. OSError if it is missing."""
    return FileEntry(*SCHEMES[format].hash(path, cores_of_rank()))


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
    """Write the manifest, signed if MEGAPPO_CHECKPOINT_KEY is set."""
    key = SCHEMES[manifest.format].key
    files = {name: {"bytes": entry.bytes, key: entry.digest} for name, entry in manifest.files.items()}
    content = {**asdict(manifest), "files": files}
    text = _canonical(content)
    write_synced(directory / MANIFEST, json.dumps({**content, "sha256": _digest(text), **sign(text)}, indent=1, sort_keys=True))


def read_manifest(directory: Path) -> Manifest:
    """Read a manifest; its files are not looked at.

    DamagedCheckpoint if it is missing or torn; RefusedCheckpoint if it cannot be read, has another format or not the signature of
    MEGAPPO_CHECKPOINT_KEY; UnsafeCheckpoint if it holds what megappo never writes.
    """
    name = f"{directory.name}/{MANIFEST}"
    content, signature = _parse(directory, name)
    digest = content.pop("sha256", None)
    text = _canonical(content)
    if digest != _digest(text):
        raise DamagedCheckpoint(f"{name} does not match its own checksum")
    check_signature(text, signature, name)
    if type(content.get("format")) is not int or content["format"] not in SCHEMES:
        raise RefusedCheckpoint(f"{name} has another format than {sorted(SCHEMES)}; load it with the megappo that wrote it")
    return _manifest_of(content, name)


def _parse(directory: Path, name: str) -> tuple[dict[str, Any], Any]:
    """Content without the signature, and the signature, which may be anything."""
    path = directory / MANIFEST
    if path.is_symlink():
        raise UnsafeCheckpoint(f"{name} is a symbolic link")
    try:
        os.listdir(directory)  # a directory that cannot be listed says nothing of what is missing in it
        raw = path.read_bytes()
    except FileNotFoundError as error:
        if not os.path.lexists(directory):
            raise unreadable(error, directory) from None
        raise DamagedCheckpoint(f"{name} is missing") from None
    except OSError as error:
        raise unreadable(error, path) from None
    try:
        content = json.loads(raw)
        json.dumps(content)  # what is nested almost too deep to read may be too deep to write again
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{name} is not JSON ({type(error).__name__})") from None
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"{name} is not a JSON object")
    return content, content.pop("hmac", None)


def _manifest_of(content: Mapping[str, Any], name: str) -> Manifest:
    """The manifest of checked content. UnsafeCheckpoint if its structure is not that of a manifest: nobody tore it."""
    expected = {"step": int, "world_size": int, "model_only": bool, "facts": dict, "files": dict, "format": int}
    types = {key: type(value) for key, value in content.items()}
    if types != expected:
        key = min(key for key in types.keys() | expected.keys() if types.get(key) is not expected.get(key))
        raise UnsafeCheckpoint(f"{name}: {key} is missing, unknown or of another type; the file is not from megappo")
    if content["step"] < 0 or content["world_size"] < 1:
        raise UnsafeCheckpoint(f"{name}: step {content['step']} of {content['world_size']} ranks; the file is not from megappo")
    key = SCHEMES[content["format"]].key
    files = {file: _entry_of(file, entry, key, name) for file, entry in content["files"].items()}
    return Manifest(**{**content, "files": files})


def _entry_of(file: str, entry: Any, key: str, name: str) -> FileEntry:
    path = PurePosixPath(file)
    encodable = file.isprintable() or file.isascii()  # a lone surrogate names no file
    if path.as_posix() != file or path.is_absolute() or ".." in path.parts or file == "." or "\0" in file or not encodable:
        raise UnsafeCheckpoint(f"{name} names {file!r}, which is no file below its directory; the file is not from megappo")
    if not isinstance(entry, dict) or entry.keys() != {"bytes", key}:
        raise UnsafeCheckpoint(f"{name}: {file} has no size and {key}; the file is not from megappo")
    size = entry["bytes"]
    if type(size) is not int or size < 0:
        raise UnsafeCheckpoint(f"{name}: {file} has the size {size!r}; the file is not from megappo")
    return FileEntry(size, entry[key])


def find_wrong_size(directory: Path, manifest: Manifest, names: Iterable[str] | None = None) -> str | None:
    """First of `names` (None: all files) that has another size than the manifest's; None if all are right.

    FileNotFoundError if one is missing, other OSErrors if it cannot be looked at, all with its path; UnsafeCheckpoint for a link.
    """
    linked: dict[Path, bool] = {}  # folders are looked at once
    for name in sorted(manifest.files if names is None else names):
        path = directory / name
        for folder in (directory, *(directory / parent for parent in PurePosixPath(name).parents)):
            if folder not in linked:
                linked[folder] = folder.is_symlink()
            if linked[folder]:
                raise UnsafeCheckpoint(f"{folder} is a symbolic link, which megappo never makes")
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            raise UnsafeCheckpoint(f"{path} is a symbolic link, which megappo never makes")
        if found.st_size != manifest.files[name].bytes:
            return f"{name} has {found.st_size} bytes instead of {manifest.files[name].bytes}"
    return None


def find_wrong_content(directory: Path, manifest: Manifest, names: list[str]) -> str | None:
    """First of `names` whose hash is not the manifest's; None if all are right. OSError, with the path, if one is unreadable."""
    for name in names:
        try:
            found = fingerprint_file(directory / name, manifest.format)
        except OSError as error:  # one of reading, unlike one of opening, does not say of which file
            raise OSError(error.errno, error.strerror, str(directory / name)) from None
        if found != manifest.files[name]:
            return f"{name} does not match its {SCHEMES[manifest.format].name} hash"
    return None


def _canonical(content: Mapping[str, Any]) -> bytes:
    """Bytes that checksum and signature are made of."""
    return json.dumps(content, sort_keys=True).encode()


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
