"""Copies of checkpoints in other storage: whole or none, the newest first, never in the way of training."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from megappo.checkpoint import remote
from megappo.checkpoint.manifest import MANIFEST, FileEntry, Manifest, find_wrong_size, list_files, read_manifest, write_manifest
from megappo.checkpoint.remote import RemoteCopies, copy_checkpoint, open_storage


def checkpoint(folder: Path, step: int = 1) -> Path:
    place = folder / f"step-{step}"
    (place / "policy").mkdir(parents=True)
    entries = {}
    for name in ("policy/shard-0", "policy/.metadata", "rng-0.json"):
        (place / name).write_bytes(f"{name} of {step}".encode() * 1000)
        entries[name] = FileEntry((place / name).stat().st_size, "0" * 64)
    write_manifest(place, Manifest(step, 1, False, {}, entries))
    return place


def is_whole(copy: Path) -> bool:
    return (copy / MANIFEST).is_file() and find_wrong_size(copy, read_manifest(copy)) is None


class Watched(LocalFileSystem):
    """A storage that notes its files in order, waits for `gate`, and fails at the file that `fails_at` names."""

    protocol = "watched"
    gate = threading.Event()
    came: list[str] = []
    fails_at = ""

    def put_file(self, lpath: Any, rpath: Any, *args: Any, **options: Any) -> None:
        assert self.gate.wait(20)
        self.came.append(str(rpath))
        if self.fails_at and self.fails_at in str(rpath):
            raise OSError(28, "No space left on device")
        super().put_file(lpath, rpath, *args, **options)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    Watched.gate, Watched.came, Watched.fails_at = threading.Event(), [], ""
    Watched.gate.set()
    monkeypatch.setattr(remote, "open_storage", lambda url: (Watched(), url))
    return Watched


def test_a_copy_is_the_checkpoint_and_its_manifest_comes_last(tmp_path: Path, watched: type[Watched]) -> None:
    place = checkpoint(tmp_path)
    copy_checkpoint(place, str(tmp_path / "there"))
    copy = tmp_path / "there" / "step-1"
    assert list_files(copy) == list_files(place) and is_whole(copy)
    assert all((copy / name).read_bytes() == (place / name).read_bytes() for name in list_files(place))
    assert [path.endswith(MANIFEST) for path in watched.came] == [False, False, False, True]


@pytest.mark.parametrize("before", [False, True])
def test_a_copy_that_is_interrupted_is_no_checkpoint(tmp_path: Path, watched: type[Watched], before: bool) -> None:
    """before: over an earlier copy of the same step, of a run that has been resumed from an older one since."""
    place = checkpoint(tmp_path)
    if before:
        copy_checkpoint(place, str(tmp_path / "there"))
    watched.fails_at = "rng-0"
    with pytest.raises(OSError, match="No space left"):
        copy_checkpoint(place, str(tmp_path / "there"))
    assert not (tmp_path / "there" / "step-1" / MANIFEST).exists()


def test_a_file_that_arrives_shorter_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalFileSystem, "put_file", lambda self, lpath, rpath, **_: Path(rpath).write_bytes(b"short"))
    with pytest.raises(OSError, match="policy/.metadata has 5 bytes there and 21000 here"):
        copy_checkpoint(checkpoint(tmp_path), str(tmp_path / "there"))


def test_a_failure_is_a_warning_and_the_next_one_is_copied(tmp_path: Path, watched: type[Watched], caplog: Any) -> None:
    watched.fails_at = "step-1/policy"
    copies = RemoteCopies(str(tmp_path / "there"))
    copies.submit(1, checkpoint(tmp_path, 1))
    while copies.steps_needed:
        pass
    copies.submit(2, checkpoint(tmp_path, 2))
    assert not copies.close(20) and copies.failed == 1
    assert is_whole(tmp_path / "there" / "step-2") and not (tmp_path / "there" / "step-1" / MANIFEST).exists()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("step-1 was not copied to ") and "No space left on device; training goes on" in warning


def test_a_slow_storage_gets_the_newest_and_holds_nobody(tmp_path: Path, watched: type[Watched]) -> None:
    watched.gate.clear()
    copies = RemoteCopies(str(tmp_path / "there"))
    for step in (1, 2, 3):
        copies.submit(step, checkpoint(tmp_path, step))
        while step == 1 and copies._copying is None:
            pass
    assert copies.steps_needed == {1, 3} and copies.skipped == 1
    assert not copies.close(0.1), "it is not waited for longer than allowed"
    watched.gate.set()
    copies._thread.join(20)
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["step-1", "step-3"]


@pytest.mark.parametrize(
    ("url", "says"),
    [("nosuch://bucket/runs", "cannot be used: Protocol not known: nosuch"), ("s3://bucket/runs", "cannot be used: Install s3fs")],
)
def test_a_storage_that_cannot_be_used_is_one_line(url: str, says: str) -> None:
    with pytest.raises(ValueError) as refusal:
        open_storage(url)
    assert str(refusal.value).startswith(says) and "\n" not in str(refusal.value)


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be used: "):
        open_storage(f"file://{tmp_path / 'file' / 'below'}")
    shutil.rmtree(tmp_path)
