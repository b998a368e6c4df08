"""Cache of prepared data: folders, each named by the hash of all that decides its content.
One process makes a folder and the others of its file system wait for it; it appears under its name when it is complete."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3

VARIABLE = "MEGAPPO_CACHE"


def cache_dir() -> Path:
    """MEGAPPO_CACHE, else XDG_CACHE_HOME/megappo, else ~/.cache/megappo; it need not exist. Raises ValueError without a home."""
    if folder := os.environ.get(VARIABLE):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megappo"
    except RuntimeError:  # a container's user without a name, and no HOME
        raise ValueError(f"no home directory for the cache of prepared data: set {VARIABLE} to a folder of yours") from None


KEPT_DAYS = 90  # entries that nobody has opened for so long are removed when another is made
ABANDONED_S = 7 * 86400.0  # folders of killed processes: none prepares data for so long
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

Key = Mapping[str, Any]


class Cache:
    """Entries below a folder.
    If the folder is not writable, its entries are read and new ones are made in a temporary folder of this process."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or cache_dir()).absolute() / "data"
        # Lines for the plan, on what could not be kept.
        self.notes: list[str] = []
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._refused = ""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / _temporary_name("probe")
            probe.touch()
            probe.unlink()
        except OSError as error:
            self._refused = error.strerror or str(error)

    @property
    def is_writable(self) -> bool:
        return not self._refused

    def folder(self, key: Key, build: Callable[[Path], object]) -> Path:
        """Return the folder of this key; `build` fills an empty one if there is none.
        Raises ValueError, one line, if the disk is full. Errors of `build` leave nothing behind."""
        entry = self.root / digest(key)
        if entry.is_dir():
            _touch(entry)
            return entry
        if not self.is_writable:
            return self._own(entry.name, build)
        with self._lock(entry.name):
            if not entry.is_dir():
                self._make(entry, build)
                self._evict()
        return entry

    def find(self, key: Key) -> Path | None:
        """Return the folder of this key; None if there is none."""
        entry = self.root / digest(key)
        if not entry.is_dir():
            return None
        _touch(entry)
        return entry

    def value(self, key: Key, make: Callable[[], Any]) -> Any:
        """Return the JSON value of this key, made by `make` if it is not kept. Errors of `make` are not kept."""
        name = "value.json"
        folder = self.folder(key, lambda folder: (folder / name).write_text(json.dumps(make()), encoding="utf-8"))
        return json.loads((folder / name).read_text(encoding="utf-8"))

    def _make(self, entry: Path, build: Callable[[Path], object]) -> None:
        temporary = self.root / _temporary_name(entry.name)
        temporary.mkdir()
        try:
            build(temporary)
            for file in temporary.iterdir():
                _flush(file)  # the name must not outlive the content in a crash of the machine: nothing checks it later
            temporary.rename(entry)
        except OSError as error:
            # Without locks another process may have been faster, and its entry is as good.
            if not entry.is_dir():
                fix = f"{error.strerror}; make room, or name another folder"
                raise ValueError(f"{VARIABLE}: {self.root} does not take the prepared data: {fix}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _own(self, name: str, build: Callable[[Path], object]) -> Path:
        # The folder cannot be written: this process makes the entry for itself.
        note = f"{self.root} cannot be written ({self._refused}), so every start of every rank prepares the data; set {VARIABLE}"
        if self._temporary is None:
            self.notes.append(note)
            self._temporary = tempfile.TemporaryDirectory(prefix="megappo-")
        entry = Path(self._temporary.name) / name
        if not entry.is_dir():
            entry.mkdir()
            build(entry)
        return entry

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        with (self.root / f"{name}.lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                # Without locks several processes may make the entry; one is kept.
                if error.errno not in _NO_LOCKS:
                    raise
            yield

    def _evict(self) -> None:
        now = time.time()
        for entry in self.root.iterdir():
            try:
                if now - entry.stat().st_mtime > (ABANDONED_S if ".tmp-" in entry.name else KEPT_DAYS * 86400):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            except OSError:
                continue  # another process removes it too, or it is another user's


def digest(key: Key) -> str:
    """SHA-256 of a JSON-compatible mapping, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def content_of(files: Sequence[Path]) -> str:
    """Hash of the contents of these files, read at every call (BLAKE3 on all cores: seconds for tens of gigabytes)."""
    return digest({"files": [blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest() for file in files]})


def signature(files: Sequence[Path]) -> list[list[int]]:
    """State of each file: [size, mtime (ns), ctime (ns), inode]. Equal while nobody writes to it."""
    return [[stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for stat in (file.stat() for file in files)]


def hash_of_modules(*packages: Any) -> str:
    """SHA-256 of the sources of these packages."""
    folders = [Path(package.__file__ or "").parent for package in packages]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _temporary_name(name: str) -> str:
    return f"{name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"  # ranks of several nodes may share the folder and a process id


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except OSError:
        pass  # another user's entry, or a read-only one: only its age is wrong then


def _flush(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
