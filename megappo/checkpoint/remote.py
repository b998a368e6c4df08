"""Copies of complete checkpoints in other storage (object store, other file system), made by rank 0 beside training with fsspec,
and fetched for a resume elsewhere. The manifest goes last: a copy without one is incomplete. Nothing is removed there. A failed
copy is a warning; a store slower than the saves skips some. Imports no torch."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megappo.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    RefusedCheckpoint,
    find_wrong_content,
    find_wrong_size,
    list_files,
    read_manifest,
    require_complete,
)
from megappo.runtime.messages import first_line

COPY_S = 600.0
"""Seconds that an ending run waits for its last copies: a node's time is worth more than a checkpoint that the disk has too."""

logger = logging.getLogger(__name__)


def require_protocol(url: str) -> None:
    """Raise ValueError, one line, if fsspec knows no storage of this protocol or lacks a package for it. Connects to nothing."""
    from fsspec import get_filesystem_class
    from fsspec.utils import get_protocol

    try:
        get_filesystem_class(get_protocol(url))
    except (ValueError, ImportError) as error:
        raise ValueError(f"cannot be used: {first_line(error)}") from error


def url_of_run(remote: str, name: str) -> str:
    """Return the URL of a run's copies below `checkpoint.remote`."""
    return f"{remote.rstrip('/')}/{name}"


@contextlib.contextmanager
def _said_in_one_line(what: str) -> Iterator[None]:
    """Make a ValueError `WHAT: reason` of whatever a storage raises (botocore's, gcsfs's own exceptions)."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what}: {first_line(error)}") from error


def storage_of(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL and the path in it, which may be missing. ValueError, one line, if it cannot be used."""
    import fsspec

    with _said_in_one_line("cannot be used"):
        storage, root = fsspec.core.url_to_fs(url)
    return storage, root.rstrip("/")


def open_storage(url: str) -> tuple[Any, str]:
    """Call `storage_of` and make the directory. ValueError, one line: unknown protocol, missing package, no access."""
    storage, root = storage_of(url)
    with _said_in_one_line("cannot be used"):
        storage.makedirs(root, exist_ok=True)
    return storage, root


class RemoteCopies:
    """Copies to `url`, one after the other, in a thread. failed, skipped: checkpoints without a copy."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._changed = threading.Condition()
        self._waiting: tuple[int, Path] | None = None
        self._copying: tuple[int, Path] | None = None
        self._closed = False
        self.failed = self.skipped = 0
        self._thread = threading.Thread(target=self._work, name="copies of checkpoints", daemon=True)
        self._thread.start()

    @property
    def steps_needed(self) -> frozenset[int]:
        """Steps of the checkpoints that must stay until their copies are made."""
        with self._changed:
            return frozenset(one[0] for one in (self._waiting, self._copying) if one is not None)

    def submit(self, step: int, checkpoint: Path) -> None:
        """Copy a complete checkpoint once the copy in progress is done. It replaces one that still waits: the newest is worth
        most."""
        with self._changed:
            if self._waiting is not None:
                self.skipped += 1
                logger.warning("%s is slower than the saves: %s is not copied", self._url, self._waiting[1].name)
            self._waiting = step, checkpoint
            self._changed.notify_all()

    def close(self, limit_s: float) -> bool:
        """Wait at most `limit_s` seconds for the copies; return True if none is missing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            logger.warning(
                "%s: the copies of steps %s were not complete after %.0f s", self._url, sorted(self.steps_needed), limit_s
            )
        return not self._thread.is_alive() and not self.failed

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closed)
                if self._waiting is None:
                    return
                self._copying, self._waiting = self._waiting, None
            checkpoint = self._copying[1]
            try:
                copy_checkpoint(checkpoint, self._url)
                logger.info("copied %s to %s", checkpoint.name, self._url)
            # Whatever the storage raises: the next checkpoint is tried again.
            except Exception as error:
                self.failed += 1
                logger.warning("%s was not copied to %s: %s; training goes on", checkpoint.name, self._url, first_line(error))
            with self._changed:
                self._copying = None


def copy_checkpoint(checkpoint: Path, url: str) -> None:
    """Copy a checkpoint's directory below `url`. OSError if a file arrives with another size; other errors are the storage's."""
    storage, root = open_storage(url)
    target = f"{root}/{checkpoint.name}"
    # A run resumed from an older step may save this step again: without its manifest the old copy counts as incomplete.
    if storage.exists(f"{target}/{MANIFEST}"):
        storage.rm_file(f"{target}/{MANIFEST}")
    for name in (*sorted(list_files(checkpoint)), MANIFEST):
        there = f"{target}/{name}"
        storage.makedirs(there.rpartition("/")[0], exist_ok=True)
        storage.put_file(str(checkpoint / name), there)
        if (arrived := storage.size(there)) != (size := (checkpoint / name).stat().st_size):
            raise OSError(f"{name} has {arrived} bytes there and {size} here")


_STEP = re.compile(r"step-(\d+)")


def list_copies(url: str) -> list[int]:
    """List the steps of the complete copies below a URL, newest first. ValueError, one line, if the storage cannot be read."""
    storage, root = storage_of(url)
    with _said_in_one_line("cannot be read"):
        names = (
            [str(path).rstrip("/").rpartition("/")[2] for path in storage.ls(root, detail=False)] if storage.exists(root) else []
        )
        steps = [int(found[1]) for name in names if (found := _STEP.fullmatch(name))]
        return sorted((step for step in steps if storage.exists(f"{root}/step-{step}/{MANIFEST}")), reverse=True)


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
    except Exception as error:  # the storage's own
        raise ValueError(f"{there}/{name} cannot be read: {first_line(error)}") from error
