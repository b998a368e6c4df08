"""The cache of prepared data: made once, by one process, complete or not there."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megappo.data import cache as module
from megappo.data.cache import Cache, cache_dir, content_of

KEY = {"a": 1}


def write(folder: Path) -> None:
    (folder / "content").write_text("content")


def read(folder: Path) -> str:
    return (folder / "content").read_text()


def builds(write: Callable[[Path], None] = write) -> tuple[list[Path], Callable[[Path], None]]:
    made: list[Path] = []

    def build(folder: Path) -> None:
        made.append(folder)
        write(folder)

    return made, build


def no_build(folder: Path) -> None:
    raise AssertionError("built again")


def entries(root: Path) -> list[Path]:
    return [path for path in (root / "data").iterdir() if path.is_dir()]


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    made, build = builds()
    for folder in (Cache(tmp_path).folder(KEY, build), Cache(tmp_path).folder(KEY, no_build)):
        assert read(folder) == "content"
    Cache(tmp_path).folder({"a": 2}, build)
    assert len(made) == 2 and not [folder for folder in entries(tmp_path) if "tmp" in folder.name]


BUILDER = """
import sys, time
from pathlib import Path
from megappo.data.cache import Cache
from tests.data.test_cache import KEY, read, write

def build(folder):
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    print("building", flush=True)
    time.sleep(float(sys.argv[3]))
    write(folder)

print(read(Cache(Path(sys.argv[1])).folder(KEY, build)), flush=True)
"""


def builder(root: Path, log: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(root), str(log), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def test_of_several_processes_one_makes_the_folder_and_all_read_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [builder(tmp_path / "cache", log, 1.0) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0].splitlines()[-1] for process in processes]
    assert outputs == ["content"] * 3 and log.read_text() == "built\n"


def test_a_process_that_is_killed_while_it_makes_it_is_followed_by_another(tmp_path: Path) -> None:
    root, log = tmp_path / "cache", tmp_path / "log"
    first = builder(root, log, 600.0)
    assert first.stdout is not None and first.stdout.readline() == "building\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    [left] = entries(root)
    assert builder(root, log, 0.0).communicate(timeout=120)[0].splitlines()[-1] == "content"
    old = time.time() - module.ABANDONED_S - 1
    os.utime(left, (old, old))
    Cache(root).folder({"a": 2}, write)
    assert not left.exists()


def test_without_locks_a_faster_process_wins_and_both_have_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    made, other = builds()

    def slower(folder: Path) -> None:
        write(folder)
        Cache(tmp_path).folder(KEY, other)

    assert read(Cache(tmp_path).folder(KEY, slower)) == "content" and len(made) == 1
    assert [path.name for path in entries(tmp_path)] == [module.digest(KEY)]


def test_a_folder_that_cannot_be_written_is_said_once_and_the_entries_are_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "cache")
    folders = [cache.folder({"a": n}, write) for n in range(2)]
    assert [read(one) for one in folders] == ["content"] * 2 and tmp_path not in folders[0].parents
    assert cache.value({"v": 1}, lambda: 3) == 3
    [note] = cache.notes
    assert "cannot be written (Not a directory)" in note and "MEGAPPO_CACHE" in note


def test_a_folder_that_cannot_be_written_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cache(tmp_path).folder(KEY, write)
    Cache(tmp_path).value({"v": 1}, lambda: 3)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    cache = Cache(tmp_path)
    assert read(cache.folder(KEY, no_build)) == "content" and cache.value({"v": 1}, lambda: 4) == 3 and not cache.notes


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        (folder / "content").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ValueError, match=r"^MEGAPPO_CACHE: .* No space left on device; make room, or name another folder$"):
        Cache(tmp_path).folder(KEY, full)
    assert not entries(tmp_path)


def test_entries_that_nobody_opens_are_removed_when_another_is_made(tmp_path: Path) -> None:
    for n in range(2):
        Cache(tmp_path).folder({"a": n}, write)
    old = time.time() - 86400 * module.KEPT_DAYS - 1
    for path in entries(tmp_path):
        os.utime(path, (old, old))
    Cache(tmp_path).folder({"a": 0}, no_build)  # opened: young again
    Cache(tmp_path).folder({"a": 2}, write)
    assert {path.name for path in entries(tmp_path)} == {module.digest({"a": 0}), module.digest({"a": 2})}


def test_values_are_kept_and_errors_are_not(tmp_path: Path) -> None:
    def refuse() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="^no$"):
        Cache(tmp_path).value(KEY, refuse)
    assert [Cache(tmp_path).value(KEY, lambda n=n: [n, "é", None]) for n in (1, 2)] == [[1, "é", None]] * 2


def test_the_hash_of_files_is_that_of_their_content(tmp_path: Path) -> None:
    """Also of one that was written in the same step of the clock, of the same size, or has no content."""
    first, second = tmp_path / "a", tmp_path / "b"
    for content in ("", "one", "two"):
        first.write_text(content)
        second.write_text(content)
        assert content_of([first]) == content_of([second])
    other = content_of([first, second])
    times = first.stat()
    first.write_text("six")
    os.utime(first, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert content_of([first]) != content_of([second]) and content_of([first, second]) != other


def test_a_user_without_a_home_is_told_the_variable(monkeypatch):
    for name in ("MEGAPPO_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for an id that the system has no name for
    with pytest.raises(ValueError, match=r"^no home directory .*: set MEGAPPO_CACHE to a folder of yours$"):
        cache_dir()
