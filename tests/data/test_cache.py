"""The cache of prepared data: made once, by one process, and never trusted further than its checksums."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megappo.data import cache as module
from megappo.data.cache import Cache
from megappo.data.token_rows import Block, DamagedRows, RowWriter, TokenRows, read_checked, write_checked
from megappo.runtime.cache_dir import cache_dir

ROWS = [([1, 2, 3], (7, -1)), ([4], (8, 2**40)), (list(range(100, 300)), (9, 0))]
KEY = {"a": 1}


def write(folder: Path) -> None:
    with RowWriter(folder) as writer:
        for tokens, columns in ROWS:
            writer.add(tokens, (*columns, *writer.add_block(b"block of %d" % columns[0])))
        writer.close({"fact": "f"})


def expected(row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(ROWS[row][0]), ROWS[row][1]


def read(rows: TokenRows, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As `expected`; the block is read too."""
    tokens, (first, second, *block) = rows.read(row)
    assert rows.read_block(Block(*block), row) == b"block of %d" % first
    return tokens, (first, second)


def builds(write: Callable[[Path], None] = write) -> tuple[list[Path], Callable[[Path], None]]:
    made: list[Path] = []

    def build(folder: Path) -> None:
        made.append(folder)
        write(folder)

    return made, build


def no_build(folder: Path) -> None:
    raise AssertionError("built again")


def test_rows_are_made_once_and_read_as_they_were_written(tmp_path: Path) -> None:
    made, build = builds()
    for rows in (Cache(tmp_path).rows(KEY, build), Cache(tmp_path).rows(KEY, no_build)):
        assert [read(rows, i) for i in range(len(rows))] == [expected(i) for i in range(3)]
        assert rows.lengths.tolist() == [3, 1, 200] and rows.facts == {"fact": "f"}
        assert rows.read_array(2).tolist() == ROWS[2][0]
    Cache(tmp_path).rows({"a": 2}, build)
    assert len(made) == 2 and not [f for f in (tmp_path / "rows").iterdir() if "tmp" in f.name]


def entry(root: Path) -> Path:
    [folder] = [path for path in (root / "rows").iterdir() if path.is_dir()]
    return folder


FILES = ("tokens.i32", "lengths.i32", "index.i64", "blocks.bin", "meta.json")


@pytest.mark.parametrize("file", FILES)
def test_a_cut_file_is_made_anew(tmp_path: Path, file: str) -> None:
    Cache(tmp_path).rows(KEY, write)
    path = entry(tmp_path) / file
    path.write_bytes(path.read_bytes()[:-2])
    made, build = builds()
    rows = Cache(tmp_path).rows(KEY, build)
    assert made and [read(rows, i) for i in range(3)] == [expected(i) for i in range(3)]
    assert not (rows.folder / "damaged").exists()


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_gives_an_error_or_new_rows_and_never_others(tmp_path: Path, file: str) -> None:
    """Every byte of small files, one in each 7 of the others."""
    Cache(tmp_path).rows(KEY, write)
    good = (entry(tmp_path) / file).read_bytes()
    told = 0
    for position in range(0, len(good), 1 if len(good) < 300 else 7):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        (entry(tmp_path) / file).write_bytes(bad)
        made, build = builds()
        rows = Cache(tmp_path).rows(KEY, build)
        for row in range(3):
            try:
                assert read(rows, row) == expected(row)
                assert rows.lengths.tolist() == [3, 1, 200]
            except DamagedRows as error:
                told += 1
                assert str(rows.folder) in str(error) and not made
                rows = Cache(tmp_path).rows(KEY, build)
        assert made, f"{file}: nobody saw byte {position}"
    assert bool(told) == (file in ("tokens.i32", "index.i64", "blocks.bin"))  # the others are seen when they are opened


def test_without_its_checksum_a_flipped_bit_would_be_another_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    Cache(tmp_path).rows(KEY, write)
    path = entry(tmp_path) / "tokens.i32"
    bad = bytearray(path.read_bytes())
    bad[0] ^= 4
    path.write_bytes(bad)
    index = (entry(tmp_path) / "index.i64").read_bytes()
    monkeypatch.setattr("megappo.data.token_rows._checksum", lambda line, tokens: int.from_bytes(index[:8], "little"))
    assert Cache(tmp_path).rows(KEY, no_build).read(0)[0] == (5, 2, 3)


BUILDER = """
import sys, time
from pathlib import Path
from megappo.data.cache import Cache
from tests.data.test_cache import KEY, read, write

def build(folder):
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    write(folder)
    (folder / "meta.json").rename(folder / "later")
    print("building", flush=True)
    time.sleep(float(sys.argv[3]))
    (folder / "later").rename(folder / "meta.json")

rows = Cache(Path(sys.argv[1])).rows(KEY, build)
print(read(rows, 0), flush=True)
"""


def builder(root: Path, log: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(root), str(log), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def test_of_several_processes_one_makes_the_rows_and_all_read_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [builder(tmp_path / "cache", log, 1.0) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0].splitlines()[-1] for process in processes]
    assert outputs == [repr(expected(0))] * 3 and log.read_text() == "built\n"


def test_a_process_that_is_killed_while_it_makes_them_is_followed_by_another(tmp_path: Path) -> None:
    root, log = tmp_path / "cache", tmp_path / "log"
    first = builder(root, log, 600.0)
    assert first.stdout is not None and first.stdout.readline() == "building\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    [left] = [path for path in (root / "rows").iterdir() if path.is_dir()]
    assert builder(root, log, 0.0).communicate(timeout=120)[0].splitlines()[-1] == repr(expected(0))
    old = time.time() - module.ABANDONED_S - 1
    os.utime(left, (old, old))
    Cache(root).rows({"a": 2}, write)
    assert not left.exists()


def test_without_locks_a_faster_process_wins_and_both_have_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    made, other = builds()

    def slower(folder: Path) -> None:
        write(folder)
        Cache(tmp_path).rows(KEY, other)

    assert read(Cache(tmp_path).rows(KEY, slower), 0) == expected(0) and len(made) == 1
    assert [path.name for path in (tmp_path / "rows").iterdir() if path.is_dir()] == [module.digest(KEY)]


def test_a_folder_that_cannot_be_written_is_said_once_and_the_rows_are_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "cache")
    rows = [cache.rows({"a": n}, write) for n in range(2)]
    assert [read(one, 2) for one in rows] == [expected(2)] * 2 and not rows[0].folder.exists()
    assert cache.value(KEY, lambda: 3) == 3
    [note] = cache.notes
    assert "cannot be written (Not a directory)" in note and "MEGAPPO_CACHE" in note


def test_a_folder_that_cannot_be_written_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cache(tmp_path).rows(KEY, write)
    Cache(tmp_path).value(KEY, lambda: 3)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    cache = Cache(tmp_path)
    assert read(cache.rows(KEY, no_build), 0) == expected(0) and cache.value(KEY, lambda: 4) == 3 and not cache.notes


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        (folder / "tokens.i32").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ValueError, match=r"^MEGAPPO_CACHE: .* No space left on device; make room, or name another folder$"):
        Cache(tmp_path).rows(KEY, full)
    assert not [path for path in (tmp_path / "rows").iterdir() if path.is_dir()]


def test_entries_that_nobody_opens_are_removed_when_another_is_made(tmp_path: Path) -> None:
    for n in range(2):
        Cache(tmp_path).rows({"a": n}, write)
        Cache(tmp_path).value({"a": n}, lambda: n)
    old = time.time() - 86400 * module.KEPT_DAYS - 1
    for path in (*tmp_path.glob("rows/*/meta.json"), *tmp_path.glob("values/*.json")):
        os.utime(path, (old, old))
    Cache(tmp_path).rows({"a": 0}, no_build)  # opened: young again
    Cache(tmp_path).rows({"a": 2}, write)
    left = {path.parent.name for path in tmp_path.glob("rows/*/meta.json")}
    assert left == {module.digest({"a": 0}), module.digest({"a": 2})} and not list(tmp_path.glob("values/*.json"))


def test_values_are_kept_and_a_changed_one_is_not_believed(tmp_path: Path) -> None:
    assert [Cache(tmp_path).value(KEY, lambda: n) for n in (1, 2)] == [1, 1]
    [path] = tmp_path.glob("values/*.json")
    path.write_text(path.read_text().replace("1}", "7}"))
    assert Cache(tmp_path).value(KEY, lambda: 3) == 3
    write_checked(tmp_path / "v", {"a": [1, "é"]})
    assert read_checked(tmp_path / "v") == {"a": [1, "é"]} and read_checked(tmp_path / "absent") is None


def test_a_value_that_finds_no_room_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_checked", full)
    cache = Cache(tmp_path)
    assert cache.value(KEY, lambda: 3) == 3 and "No space left on device" in cache.notes[0]


def count_hashing(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    hashed: list[Path] = []
    monkeypatch.setattr(module, "_hash_file", lambda file: hashed.append(file) or hashlib.sha256(file.read_bytes()).hexdigest())
    return hashed


def test_a_file_is_read_again_only_if_it_was_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLED_S", 0.0)
    hashed, file = count_hashing(monkeypatch), tmp_path / "a.jsonl"
    file.write_text("one\n")
    times = file.stat()
    first = Cache(tmp_path / "cache").content_of([file])
    assert Cache(tmp_path / "cache").content_of([file]) == first and len(hashed) == 1
    file.write_text("two\n")  # of the same size, and said to be of the same age
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert Cache(tmp_path / "cache").content_of([file]) != first and len(hashed) == 2


def test_a_file_that_has_just_been_written_is_read_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change within the clock's step would have the same times."""
    hashed, file = count_hashing(monkeypatch), tmp_path / "a.jsonl"
    file.write_text("one\n")
    for _ in range(2):
        Cache(tmp_path / "cache").content_of([file])
    assert len(hashed) == 2


def test_mutated_meta_files_are_never_believed(tmp_path: Path) -> None:
    write_checked(path := tmp_path / "m", {"a": 1})
    good, rng = path.read_bytes(), random.Random(0)
    for _ in range(200):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        assert read_checked(path) in (None, {"a": 1})
    assert json.loads(good.split(b"\n")[1]) == {"a": 1}


def test_a_user_without_a_home_is_told_the_variable(monkeypatch):
    for name in ("MEGAPPO_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for an id that the system has no name for
    with pytest.raises(ValueError, match=r"^no home directory .*: set MEGAPPO_CACHE to a folder of yours$"):
        cache_dir()
