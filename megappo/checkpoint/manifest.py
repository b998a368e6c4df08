"""Manifest of a checkpoint: every file with its size and hash, and the facts about the run that wrote it. Imports no torch. It is
written last: a directory without one is no checkpoint. It detects damage; forgery only if MEGAPPO_CHECKPOINT_KEY is set, which
signs it (HMAC-SHA256) and so every file's hash. That stops writers to the run directory who cannot read the job's environment."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megappo.checkpoint.files import FileEntry, cores_of_rank, hash_file


class DamagedCheckpoint(ValueError):
    """The files are readable but not as saved: another hash or size, a missing file, or a torn manifest."""


class RefusedCheckpoint(ValueError):
    """A checkpoint that cannot be taken, or not by this process, and may be whole: nothing of it is renamed or removed."""


class UnsafeCheckpoint(RefusedCheckpoint):
    """The checkpoint contains something that megappo never writes. Nothing of it was run."""


def unreadable(error: OSError, path: Path) -> RefusedCheckpoint:
    """Make the refusal for an I/O error, which says nothing about the contents. path: of what was read, if the error names none."""
    return RefusedCheckpoint(
        f"{error.filename or path}: {error.strerror or error}; nothing was renamed or removed: it may be whole, so make it "
        "readable (mount, permissions, disk) and try again"
    )


MANIFEST = "manifest.json"
FORMAT = 1
HASH = "blake3"
"""Key of a file's hash."""
STATE = "state.json"
"""State of the trainer and its components."""
POSITION, SHARD = "position.json", ".safetensors"
"""Files of a model: the position of its optimizer, and the ending of those with its tensors."""
_MODELS = "models"
KEY_VARIABLE = "MEGAPPO_CHECKPOINT_KEY"  # `commands/launch/environment.py` hides values of names with KEY
BEST = "best"
"""Fact of a checkpoint: {step, metric, mode, value} of the best step of its run so far (`trainer.keep_best`)."""


@dataclass(frozen=True)
class Manifest:
    """Content of a manifest. files: path relative to the checkpoint directory -> entry. facts: see `identity.py`."""

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


def rng_file(rank: int) -> str:
    return f"rng-{rank:05d}.safetensors"


def engine_folder(name: str) -> str:
    return f"{_MODELS}/{name}"


def models_of(manifest: Manifest) -> frozenset[str]:
    """Return the names of the models that a checkpoint holds."""
    return frozenset(_files_of_models(manifest))


def _files_of_models(manifest: Manifest) -> dict[str, set[str]]:
    models: dict[str, set[str]] = defaultdict(set)
    for name in manifest.files:
        folder, _, rest = name.partition("/")
        if folder == _MODELS:
            model, _, file = rest.partition("/")
            models[model].add(file)
    return models


def require_complete(manifest: Manifest) -> None:
    """Raise UnsafeCheckpoint if the manifest leaves out a file that every checkpoint has, as changes to it would go unnoticed."""
    models = _files_of_models(manifest)
    wanted = set() if manifest.model_only else {STATE}
    if not manifest.model_only and manifest.world_size <= len(manifest.files):
        wanted |= {rng_file(rank) for rank in range(manifest.world_size)}
    elif not manifest.model_only:  # no list of so many ranks is made: the number may be anything
        wanted.add(rng_file(manifest.world_size - 1))
    for model, files in models.items():
        wanted.add(f"{engine_folder(model)}/{POSITION}")
        if not any(file.endswith(SHARD) for file in files):
            wanted.add(f"{engine_folder(model)}/*{SHARD}")
    missing = wanted - manifest.files.keys() or (set() if models else {f"{_MODELS}/"})
    if missing:
        raise UnsafeCheckpoint(f"step-{manifest.step}: its manifest leaves out {min(missing)}; the file is not from megappo")


def fingerprint_file(path: Path) -> FileEntry:
    """Hash a file with all cores of this rank. OSError if it is missing."""
    return hash_file(path, cores_of_rank())


def write_synced(path: Path, content: str) -> None:
    """Write a small text file and force it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def list_files(directory: Path) -> list[str]:
    """List the relative paths of all files below, sorted, without the manifest itself."""
    found = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, signed if MEGAPPO_CHECKPOINT_KEY is set."""
    files = {name: {"bytes": entry.bytes, HASH: entry.digest} for name, entry in manifest.files.items()}
    content = {**asdict(manifest), "files": files}
    text = _canonical(content)
    write_synced(
        directory / MANIFEST, json.dumps({**content, "sha256": _digest(text), **_signature(text)}, indent=1, sort_keys=True)
    )


def read_manifest(directory: Path) -> Manifest:
    """Read a manifest without looking at its files. DamagedCheckpoint if it is missing or torn; RefusedCheckpoint if it cannot be
    read, has another format or lacks the signature of MEGAPPO_CHECKPOINT_KEY; UnsafeCheckpoint if it holds what megappo never
    writes."""
    name = f"{directory.name}/{MANIFEST}"
    content, signature = _parse(directory, name)
    digest = content.pop("sha256", None)
    text = _canonical(content)
    if digest != _digest(text):
        raise DamagedCheckpoint(f"{name} does not match its own checksum")
    _check_signature(text, signature, name)
    if type(content.get("format")) is not int or content["format"] != FORMAT:
        raise RefusedCheckpoint(f"{name} has another format than {FORMAT}; load it with the megappo that wrote it")
    return _manifest_of(content, name)


def _parse(directory: Path, name: str) -> tuple[dict[str, Any], Any]:
    path = directory / MANIFEST
    try:
        if path.is_symlink():  # raises in a directory that cannot be searched
            raise UnsafeCheckpoint(f"{name} is a symbolic link")
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
    """Build the manifest from checked content. UnsafeCheckpoint if its structure is wrong, which no torn write explains."""
    expected = {"step": int, "world_size": int, "model_only": bool, "facts": dict, "files": dict, "format": int}
    types = {key: type(value) for key, value in content.items()}
    if types != expected:
        key = min(key for key in types.keys() | expected.keys() if types.get(key) is not expected.get(key))
        raise UnsafeCheckpoint(f"{name}: {key} is missing, unknown or of another type; the file is not from megappo")
    if content["step"] < 0 or content["world_size"] < 1:
        raise UnsafeCheckpoint(f"{name}: step {content['step']} of {content['world_size']} ranks; the file is not from megappo")
    files = {file: _entry_of(file, entry, name) for file, entry in content["files"].items()}
    return Manifest(**{**content, "files": files})


def _entry_of(file: str, entry: Any, name: str) -> FileEntry:
    path = PurePosixPath(file)
    encodable = file.isprintable() or file.isascii()  # a lone surrogate names no file
    if path.as_posix() != file or path.is_absolute() or ".." in path.parts or file == "." or "\0" in file or not encodable:
        raise UnsafeCheckpoint(f"{name} names {file!r}, which is no file below its directory; the file is not from megappo")
    if not isinstance(entry, dict) or entry.keys() != {"bytes", HASH}:
        raise UnsafeCheckpoint(f"{name}: {file} has no size and {HASH}; the file is not from megappo")
    size = entry["bytes"]
    if type(size) is not int or size < 0:
        raise UnsafeCheckpoint(f"{name}: {file} has the size {size!r}; the file is not from megappo")
    return FileEntry(size, entry[HASH])


def find_wrong_size(directory: Path, manifest: Manifest, names: Iterable[str] | None = None) -> str | None:
    """Return a line on the first of `names` (None: all files) whose size differs from the manifest's; None if all are right.
    FileNotFoundError if one is missing, other OSErrors if it cannot be looked at, all with its path; UnsafeCheckpoint for a
    link."""
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
    """Return a line on the first of `names` whose hash differs; None if all are right. OSError, with the path, if one is
    unreadable."""
    for name in names:
        try:
            found = fingerprint_file(directory / name)
        except OSError as error:  # one of reading, unlike one of opening, does not say of which file
            raise OSError(error.errno, error.strerror, str(directory / name)) from None
        if found != manifest.files[name]:
            return f"{name} does not match its BLAKE3 hash"
    return None


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _signature(text: bytes) -> dict[str, str]:
    key = _key()
    return {} if key is None else {"hmac": hmac.digest(key, text, "sha256").hex()}


def _check_signature(text: bytes, found: Any, name: str) -> None:
    """Raise RefusedCheckpoint if there is a key and `found` is not its signature of `text`."""
    wanted = _signature(text)
    if not wanted:
        return
    if found is None:
        raise RefusedCheckpoint(
            f"{name} is not signed, and {KEY_VARIABLE} is set; nothing was changed: unset it if you trust whoever can write there"
        )
    if not isinstance(found, str) or not hmac.compare_digest(wanted["hmac"].encode(), found.encode(errors="replace")):
        raise RefusedCheckpoint(
            f"{name} was not signed with the key in {KEY_VARIABLE}; nothing was changed: set the key of the run that saved it"
        )


def _key() -> bytes | None:
    text = os.environ.get(KEY_VARIABLE)
    if text is not None and not text.strip():
        raise RefusedCheckpoint(f"{KEY_VARIABLE} is set and empty; set it to the key, or unset it")
    return None if text is None else os.fsencode(text)
