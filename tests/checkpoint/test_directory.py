"""The commit protocol on plain files: kills between any two file operations, retention, leftovers, free space."""

import os
import shutil
from collections import namedtuple

import pytest

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.manifest import MANIFEST, Manifest, fingerprint_file, list_files, read_manifest, write_manifest

OPERATIONS = [(os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree")]


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test may see it."""


def save(directory, step, keep_last=2, size=100):
    place = directory.begin(step, "token")
    (place / "weights").write_bytes(bytes([step % 256]) * size)
    files = {name: fingerprint_file(place / name, sync=True) for name in list_files(place)}
    write_manifest(place, Manifest(step, 1, False, {}, files))
    directory.publish(place, step)
    return directory.retain(keep_last, step)


def damage(directory, step):
    (directory.step_path(step) / "weights").unlink()


def kill_at(monkeypatch, number, *, before):
    """Raise Killed before, or just after, the `number`-th file operation. Returns the list that counts them."""
    done = []
    for module, name in OPERATIONS:

        def operation(*args, _original=getattr(module, name), **kwargs):
            done.append(None)
            if len(done) == number and before:
                raise Killed
            result = _original(*args, **kwargs)
            if len(done) == number:
                raise Killed
            return result

        monkeypatch.setattr(module, name, operation)
    return done


def test_a_kill_at_any_moment_leaves_a_valid_newest(tmp_path, monkeypatch):
    killed = 0
    for before in (True, False):
        for number in range(1, 100):
            directory = CheckpointDirectory(tmp_path / f"{number}{before}")
            save(directory, 1), save(directory, 2)
            with monkeypatch.context() as patch:
                kill_at(patch, number, before=before)
                try:
                    save(directory, 3)
                except Killed:
                    killed += 1
                else:
                    break
            newest = directory.newest()
            assert newest.step in (2, 3)
            assert fingerprint_file(directory.step_path(newest.step) / "weights") == newest.files["weights"]
            save(directory, 4)
            assert set(os.listdir(directory.path)) <= {"LATEST", "step-2", "step-3", "step-4"}
            assert directory.newest().step == 4
    assert killed == 20  # ten operations, before and after each


def test_writing_in_place_would_be_found(tmp_path, monkeypatch):
    """Negative control of the kill test: without the rename, a kill leaves a torn checkpoint under a valid name."""
    directory = CheckpointDirectory(tmp_path)
    save(directory, 1)
    place = directory.step_path(2)
    place.mkdir()
    (place / "weights").write_bytes(b"half")
    assert directory.steps() == [2, 1]
    assert directory.newest().step == 1


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_retention_counts_numerically_and_skips_damaged(tmp_path, keep_last):
    directory = CheckpointDirectory(tmp_path)
    for step in (9998, 9999, 10000):
        save(directory, step, keep_last=10)
    damage(directory, 10000)
    save(directory, 10001, keep_last=keep_last)
    expected = {1: {10001}, 2: {10001, 9999}, 3: {10001, 9999, 9998}}[keep_last]
    assert set(directory.steps()) == expected | {10000}  # damaged ones are for a person to look at


def test_a_stale_higher_step_does_not_remove_the_new_one(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    save(directory, 20)
    assert save(directory, 5, keep_last=1) == []
    assert directory.steps() == [20, 5]


def test_links_are_neither_checkpoints_nor_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    directory = CheckpointDirectory(tmp_path / "run")
    save(directory, 1)
    (directory.path / "step-7").symlink_to(outside)
    (directory.path / ".tmp-link").symlink_to(outside)
    save(directory, 2, keep_last=1)
    assert (outside / "file").read_text() == "kept"
    assert directory.steps() == [2]


def test_a_full_disk_is_noticed_before_writing(tmp_path, monkeypatch):
    directory = CheckpointDirectory(tmp_path)
    save(directory, 1, size=1000)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1199))
    with pytest.raises(ValueError, match="free some space"):
        directory.begin(2, "token")
    assert not list(tmp_path.glob(".tmp-*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1200))
    directory.begin(2, "token")


def test_damaged_ones_get_their_own_names(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    names = []
    for _ in range(3):
        save(directory, 4)
        names.append(directory.set_aside(4).name)
    assert names == ["bad-step-4", "bad-step-4.2", "bad-step-4.3"]
    assert directory.newest() is None


def test_a_manifest_that_was_edited_is_refused(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    save(directory, 1)
    path = directory.step_path(1) / MANIFEST
    path.write_text(path.read_text().replace('"model_only": false', '"model_only": true'))
    with pytest.raises(ValueError, match="own checksum"):
        read_manifest(directory.step_path(1))


def test_a_renamed_checkpoint_is_refused(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    save(directory, 1)
    os.rename(directory.step_path(1), directory.step_path(9))
    with pytest.raises(ValueError, match="that of step 1"):
        directory.read(9)
