"""The commit protocol on plain files: kills between any two file operations, retention, leftovers, free space."""

import errno
import os
import shutil
import signal
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from megappo.checkpoint import directory as directory_module
from megappo.checkpoint import manifest as manifest_module
from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    fingerprint_file,
    list_files,
    read_manifest,
    write_manifest,
    write_synced,
)

LEASE = "a1b2"
OPERATIONS = [(os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree")]


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test may see it."""


def save(directory, step, keep_last=2, size=100):
    place = directory.begin(step)
    write_synced(place / "weights", chr(step % 128) * size)
    files = {name: fingerprint_file(place / name) for name in list_files(place)}
    write_manifest(place, Manifest(step, 1, False, {}, files))
    directory.publish(place, step)
    return directory.retain(keep_last, {step})


def latest(directory):
    return (directory.path / "LATEST").read_text().strip()


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
            directory = CheckpointDirectory(tmp_path / f"{number}{before}", owner=LEASE)
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
    directory = CheckpointDirectory(tmp_path, owner=LEASE)
    save(directory, 1)
    place = directory.step_path(2)
    place.mkdir()
    (place / "weights").write_bytes(b"half")
    assert directory.steps() == [2, 1]
    assert directory.newest().step == 1


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_retention_counts_numerically_and_skips_damaged(tmp_path, keep_last):
    directory = CheckpointDirectory(tmp_path, owner=LEASE)
    for step in (9998, 9999, 10000):
        save(directory, step, keep_last=10)
    damage(directory, 10000)
    save(directory, 10001, keep_last=keep_last)
    expected = {1: {10001}, 2: {10001, 9999}, 3: {10001, 9999, 9998}}[keep_last]
    assert set(directory.steps()) == expected | {10000}  # damaged ones are for a person to look at


def test_a_stale_higher_step_does_not_remove_the_new_one(tmp_path):
    directory = CheckpointDirectory(tmp_path, owner=LEASE)
    save(directory, 20)
    assert save(directory, 5, keep_last=1) == []
    assert directory.steps() == [20, 5]


def test_links_are_neither_checkpoints_nor_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    directory = CheckpointDirectory(tmp_path / "run", owner=LEASE)
    save(directory, 1)
    (directory.path / "step-7").symlink_to(outside)
    (directory.path / ".tmp-link").symlink_to(outside)
    save(directory, 2, keep_last=1)
    assert (outside / "file").read_text() == "kept"
    assert directory.steps() == [2]


def test_a_full_disk_is_noticed_before_writing(tmp_path, monkeypatch):
    directory = CheckpointDirectory(tmp_path, owner=LEASE)
    save(directory, 1, size=1000)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1199))
    with pytest.raises(ValueError, match="free some space"):
        directory.begin(2)
    assert not list(tmp_path.glob(".tmp-*"))
    with pytest.raises(ValueError, match="has 1.17 KiB free, the next checkpoint needs 1.17 KiB"):  # not 0.00 GiB
        directory.begin(2)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1200))
    directory.begin(2)


def test_damaged_ones_get_their_own_names(tmp_path):
    directory = CheckpointDirectory(tmp_path, owner=LEASE)
    names = []
    for _ in range(3):
        save(directory, 4)
        names.append(directory.set_aside(4).name)
    assert names == ["bad-step-4", "bad-step-4.2", "bad-step-4.3"]
    assert directory.newest() is None


@pytest.mark.parametrize("owner", [LEASE, None])
def test_a_failed_save_of_the_same_step_that_cannot_be_removed_is_in_nobodys_way(tmp_path, monkeypatch, caplog, owner):
    directory = CheckpointDirectory(tmp_path, owner=owner)
    first = directory.begin(1)
    (first / "stuck").write_text("")

    def failing(path, **_):
        raise PermissionError(errno.EPERM, "Operation not permitted", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing)
        save(directory, 1)
    assert first.is_dir() and directory.steps() == [1]
    assert len(caplog.records) == (owner is not None)
    save(directory, 2)
    assert first.exists() == (owner is None)


def test_an_old_checkpoint_that_cannot_be_renamed_stays_and_is_named(tmp_path, monkeypatch, caplog):
    directory = CheckpointDirectory(tmp_path, owner=LEASE)
    save(directory, 1)
    usual = os.rename

    def failing(source, target):
        if Path(source).name == "step-1":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(source))
        usual(source, target)

    monkeypatch.setattr(os, "rename", failing)
    assert save(directory, 2, keep_last=1) == []
    assert directory.steps() == [2, 1]
    assert "step-1 cannot be removed: Operation not permitted" in caplog.text


def test_an_old_checkpoint_that_cannot_be_read_neither_counts_nor_goes(tmp_path, caplog):
    directory = CheckpointDirectory(tmp_path, owner=LEASE)
    save(directory, 1), save(directory, 2)
    manifest = directory.step_path(1) / MANIFEST
    manifest.unlink()
    manifest.mkdir()
    save(directory, 3, keep_last=1)
    assert directory.steps() == [3, 1] and "checkpoint of step 1 is passed over" in caplog.text
    assert directory.newest().step == 3


def test_newer_ones_that_are_abandoned_leave_their_steps_free(tmp_path):
    directory = CheckpointDirectory(tmp_path, owner=LEASE)
    names = []
    for _ in range(2):
        save(directory, 3), save(directory, 4, keep_last=9)
        names += [(step, path.name) for step, path in directory.abandon_newer(2)]
    assert names == [(4, "abandoned-step-4"), (3, "abandoned-step-3"), (4, "abandoned-step-4.2"), (3, "abandoned-step-3.2")]
    assert directory.steps() == []


def test_nothing_is_abandoned_without_a_lease(tmp_path):
    save(CheckpointDirectory(tmp_path, owner=LEASE), 4)
    assert CheckpointDirectory(tmp_path).abandon_newer(2) == []
    assert sorted(os.listdir(tmp_path)) == ["LATEST", "step-4"]


def test_a_kill_while_newer_ones_are_abandoned_leaves_a_valid_newest_and_no_name_of_what_is_gone(tmp_path, monkeypatch):
    killed = 0
    for before in (True, False):
        for number in range(1, 100):
            directory = CheckpointDirectory(tmp_path / f"{number}{before}", owner=LEASE)
            for step in (1, 2, 3):
                save(directory, step, keep_last=3)
            with monkeypatch.context() as patch:
                kill_at(patch, number, before=before)
                try:
                    directory.abandon_newer(1)
                except Killed:
                    killed += 1
                else:
                    break
            assert directory.newest() is not None and (directory.path / latest(directory)).is_dir()
        assert directory.steps() == [1] and latest(directory) == "step-1"
    assert killed == 2 * 5  # before and after: LATEST synced, put in its place and synced there, two renames


def test_a_latest_that_cannot_be_written_fails_no_save(tmp_path, caplog):
    """The checkpoint has its name by then: the save of its step cannot be tried again."""
    directory = CheckpointDirectory(tmp_path, owner=LEASE)
    (tmp_path / "LATEST").mkdir()
    save(directory, 1)
    assert directory.newest().step == 1 and "LATEST cannot be pointed to step-1: " in caplog.text


def in_chunks(path, content, budget):
    """Write as a process that is killed after `budget` more bytes of all its files; returns what is left of the budget."""
    with path.open("wb") as file:
        file.write(content[: max(0, budget)])
        file.flush()
        os.fsync(file.fileno())
    if budget < len(content):
        os.kill(os.getpid(), signal.SIGKILL)
    return budget - len(content)


def save_and_die(directory, step, budget):
    """A save in a process that SIGKILLs itself after so many bytes of shards, manifest and LATEST."""
    place = directory.begin(step)
    for name in ("shard-0", "shard-1", "state.json"):
        budget = in_chunks(place / name, bytes([step]) * 400, budget)
    files = {name: fingerprint_file(place / name) for name in list_files(place)}

    def write(path, text):
        nonlocal budget
        budget = in_chunks(path, text.encode(), budget)

    manifest_module.write_synced = directory_module.write_synced = write
    write_manifest(place, Manifest(step, 1, False, {}, files))
    directory.publish(place, step)
    directory.retain(2, {step})


def test_files_of_old_checkpoints_go_in_a_thread_and_the_next_save_waits_for_it(tmp_path, monkeypatch):
    directory, may_go, rmtree = CheckpointDirectory(tmp_path, owner=LEASE), threading.Event(), shutil.rmtree
    for step in (1, 2, 3):
        save(directory, step, keep_last=9)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: may_go.wait(60) and rmtree(*args, **kwargs))
    assert directory.retain(1, {3}, wait=False) == [2, 1] and directory.steps() == [3]
    assert len(list(tmp_path.glob(".tmp-*/weights"))) == 2
    threading.Timer(0.2, may_go.set).start()
    place = directory.begin(4)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and path != place] == ["step-3"]


def test_a_sigkill_at_any_of_20_offsets_of_a_save_leaves_a_valid_newest(tmp_path):
    """F5. The bytes of three shards, of the manifest and of LATEST, in a process of its own."""
    whole = 3 * 400 + 700  # and a few more of the manifest and of LATEST, so the last offsets fall into these
    outcomes = []
    for number in range(20):
        directory = CheckpointDirectory(tmp_path / str(number), owner=LEASE)
        save_all = [save(directory, step) for step in (1, 2)]
        assert save_all == [[], []]
        child = os.fork()
        if child == 0:
            save_and_die(directory, 3, whole * number // 20)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        newest = directory.newest()
        outcomes.append((os.WIFSIGNALED(status), newest.step))
        assert all(fingerprint_file(directory.step_path(newest.step) / name) == entry for name, entry in newest.files.items())
        save(directory, 4)
        assert directory.newest().step == 4 and not list(directory.path.glob(".tmp-*"))
    assert outcomes.count((True, 2)) >= 15 and all(killed or step == 3 for killed, step in outcomes)


def test_a_manifest_that_was_edited_is_refused(tmp_path):
    directory = CheckpointDirectory(tmp_path, owner=LEASE)
    save(directory, 1)
    path = directory.step_path(1) / MANIFEST
    path.write_text(path.read_text().replace('"model_only": false', '"model_only": true'))
    with pytest.raises(ValueError, match="own checksum"):
        read_manifest(directory.step_path(1))


def test_a_renamed_checkpoint_is_refused(tmp_path):
    directory = CheckpointDirectory(tmp_path, owner=LEASE)
    save(directory, 1)
    os.rename(directory.step_path(1), directory.step_path(9))
    with pytest.raises(ValueError, match="that of step 1"):
        directory.read(9)
