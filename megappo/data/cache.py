"""Cache of prepared data: folders of token rows and small values, each under the hash of all that decides its content.

One process makes an entry and the others of its file system wait for it; an entry appears under its name when it is complete.
Nothing here knows what the data mean.
"""

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

from megappo.data.token_rows import META, TokenRows, read_checked, write_checked
from megappo.runtime.cache_dir import VARIABLE, cache_dir

ROWS, VALUES = "rows", "values"
KEPT_DAYS = 90  # entries that nobody has opened for so long are removed when another is made
ABANDONED_S = 7 * 86400.0  # folders of killed processes: none prepares data for so long
# File systems count time in steps, and another machine's clock may lag: a file changed later in the same step looks unchanged.
SETTLED_S = 2.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

Key = Mapping[str, Any]


class Cache:
    """Entries below a folder. notes: lines for the plan, on what could not be kept.

    Where the folder cannot be written, what it has is read and everything else is made in a temporary folder, for this process.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or cache_dir()).absolute()
        self.notes: list[str] = []
        self._refused = ""
        try:
            for folder in (self.root / ROWS, self.root / VALUES):
                folder.mkdir(parents=True, exist_ok=True)
                probe = folder / _temporary_name("probe")
                probe.touch()
                probe.unlink()
        except OSError as error:
            self._refused = error.strerror or str(error)

    @property
    def is_writable(self) -> bool:
        return not self._refused

    def rows(self, key: Key, build: Callable[[Path], None]) -> TokenRows:
        """The rows of this key; `build` writes them into an empty folder if there are none, or damaged ones.

        ValueError, one line, if the disk is full. Errors of `build` leave nothing behind.
        """
        name = digest(key)
        if (found := self._opened(name)) is not None:
            return found
        if not self.is_writable:
            return self._temporary(build)
        with self._lock(ROWS, name):
            if (found := self._opened(name)) is not None:
                return found
            self._make(name, build)
            self._evict()
        made = self._opened(name)
        assert made is not None, f"{self.root}/rows/{name}: incomplete after it was made"
        return made

    def value(self, key: Key, make: Callable[[], Any]) -> Any:
        """The JSON value of this key; `make` gives it if it is not kept. Errors of `make` are not kept."""
        name = digest(key)
        path = self.root / VALUES / f"{name}.json"
        if (found := read_checked(path)) is not None:
            _touch(path)
            return found["value"]
        if not self.is_writable:
            return make()
        with self._lock(VALUES, name):
            if (found := read_checked(path)) is not None:
                return found["value"]
            value = make()
            temporary = path.with_name(_temporary_name(name))
            try:
                write_checked(temporary, {"value": value})
                temporary.rename(path)
            except OSError as error:
                self._note(error.strerror or str(error))
        return value

    def content_of(self, files: Sequence[Path]) -> str:
        """SHA-256 over the contents of these files, read only if size, times or inode are not those of an earlier reading."""
        return digest({"files": [self._content_of(file) for file in files]})

    def _content_of(self, file: Path) -> str:
        before = signature([file])[0]
        key = {"path": str(file.resolve()), "signature": before}
        if time.time() - max(before[1], before[2]) / 1e9 < SETTLED_S:
            return _hash_file(file)
        return self.value(key, lambda: _hash_file(file))

    def _opened(self, name: str) -> TokenRows | None:
        rows = TokenRows.open(self.root / ROWS / name)
        if rows is not None:
            _touch(rows.folder / META)
        return rows

    def _make(self, name: str, build: Callable[[Path], None]) -> None:
        folder, temporary = self.root / ROWS / name, self.root / ROWS / _temporary_name(name)
        temporary.mkdir()
        try:
            build(temporary)
            if folder.exists():  # damaged: nothing complete is there while the lock is held
                folder.rename(temporary / "damaged")
            temporary.rename(folder)
            shutil.rmtree(folder / "damaged", ignore_errors=True)
        except OSError as error:
            # Without locks another process may have been faster, and its entry is as good.
            if TokenRows.open(folder) is None:
                fix = f"{error.strerror}; make room, or name another folder"
                raise ValueError(f"{VARIABLE}: {self.root} does not take the prepared data: {fix}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _temporary(self, build: Callable[[Path], None]) -> TokenRows:
        self._note(self._refused)
        with tempfile.TemporaryDirectory(prefix="megappo-") as folder:
            build(Path(folder))
            rows = TokenRows.open(Path(folder))
        assert rows is not None, f"{folder}: incomplete after it was made"
        return rows  # mapped files stay readable without their names

    def _note(self, reason: str) -> None:
        note = f"{self.root} cannot be written ({reason}), so every start of every rank prepares the data; set {VARIABLE}"
        if note not in self.notes:
            self.notes.append(note)

    @contextmanager
    def _lock(self, kind: str, name: str) -> Iterator[None]:
        """Hold the lock of an entry; it ends with the process. On a file system without locks all make it, one is kept."""
        with (self.root / kind / f"{name}.lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            yield

    def _evict(self) -> None:
        now = time.time()
        for entry in self.root.glob("*/*"):
            try:
                used = (entry / META if (entry / META).exists() else entry).stat().st_mtime
                if now - used > (ABANDONED_S if ".tmp-" in entry.name else KEPT_DAYS * 86400):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            except OSError:
                continue  # another process removes it too, or it is another user's


def digest(key: Key) -> str:
    """SHA-256 of a JSON-compatible mapping, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def signature(files: Sequence[Path]) -> list[list[int]]:
    """[size, time of change of the content, of the inode (ns), inode] of each file: equal while nobody writes to it.

    The inode's time cannot be set back, as `touch` and copies that keep times do with the content's.
    """
    return [[stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for stat in (file.stat() for file in files)]


def hash_of_modules(*packages: Any) -> str:
    """SHA-256 of the sources of these packages."""
    folders = [Path(package.__file__ or "").parent for package in packages]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _hash_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _temporary_name(name: str) -> str:
    return f"{name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"  # ranks of several nodes may share the folder and a process id


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except OSError:
        pass  # another user's entry, or a read-only one: only its age is wrong then
