"""`megappo runs verify`: every kind of damage is found and its file named, an error of the file system is none; nothing changes."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from pathlib import Path

import pytest

from megappo.checkpoint.manifest import MANIFEST, Manifest, fingerprint_file, list_files, write_manifest
from megappo.commands import cli
from megappo.commands.runs import report
from megappo.commands.runs.report import verify_checkpoint
from tests.commands.runs.folders import FILES, save, write_lease
from tests.commands.runs.test_table import snapshot

SHARD = "models/policy/00000.safetensors"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def delete(path: Path) -> None:
    path.unlink()


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def add(path: Path) -> None:
    path.with_name("added").touch()


# how, file, named in the fault
DAMAGE = [
    (flip, SHARD, SHARD),
    (flip, "state.json", "state.json"),
    (flip, MANIFEST, MANIFEST),
    (truncate, SHARD, SHARD),
    (truncate, MANIFEST, MANIFEST),
    (delete, SHARD, SHARD),
    (add, SHARD, "models/policy/added"),
]


@pytest.mark.parametrize("damage, name, said", DAMAGE)
def test_damage_is_found_and_named(tmp_path, capsys, damage, name, said):
    for step in (5, 10, 15):
        save(tmp_path / "run", step)
    write_lease(tmp_path / "run")  # live: nothing is refused
    damage(tmp_path / "run" / "checkpoints" / "step-10" / name)
    before = snapshot(tmp_path)
    assert cli.main(["runs", "verify", str(tmp_path / "run")]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed[1:4]] == [["step-5", "ok"], ["step-10", "damaged"], ["step-15", "ok"]]
    assert len(printed) == 5 and printed[4].startswith("  step-10: ") and said in printed[4]
    assert cli.main(["runs", "verify", str(tmp_path / "run"), "--step", "5"]) == 0
    capsys.readouterr()
    assert cli.main(["runs", "verify", str(tmp_path / "run"), "--json"]) == 1
    assert [one["state"] for one in json.loads(capsys.readouterr().out)] == ["ok", "damaged", "ok"]
    assert snapshot(tmp_path) == before


def test_a_link_in_place_of_a_file_is_not_sound(tmp_path):
    place = save(tmp_path / "run", 1)
    link(place / SHARD)
    found = verify_checkpoint(tmp_path / "run", 1)
    assert not found.is_sound and SHARD in found.fault


@pytest.mark.parametrize("left_out", FILES)
def test_a_manifest_that_leaves_out_a_file_is_not_sound(tmp_path, left_out):
    """A resume refuses it, so it is not told to be sound here."""
    place = save(tmp_path / "run", 1)
    (place / left_out).unlink()
    entries = {name: fingerprint_file(place / name) for name in list_files(place)}
    write_manifest(place, Manifest(1, 1, False, {}, entries))
    found = verify_checkpoint(tmp_path / "run", 1)
    assert found.state == "unverified" and "leaves out" in found.fault and "\n" not in found.fault


def test_every_damaged_file_counts(tmp_path):
    place = save(tmp_path / "run", 1)
    flip(place / SHARD), flip(place / "state.json")
    assert verify_checkpoint(tmp_path / "run", 1).fault.endswith("does not match its BLAKE3 hash (and 1 more)")


def test_a_file_that_cannot_be_read_is_not_damaged(tmp_path, monkeypatch):
    place = save(tmp_path / "run", 1)
    original = report.find_wrong_content

    def stale(place: Path, manifest: Manifest, names: list[str]):
        if names == ["state.json"]:
            raise OSError(errno.ESTALE, "Stale file handle", "state.json")
        return original(place, manifest, names)

    monkeypatch.setattr(report, "find_wrong_content", stale)
    found = verify_checkpoint(tmp_path / "run", 1)
    assert (found.state, found.fault) == ("unverified", "state.json cannot be read: Stale file handle")
    assert report.exit_code([found]) == 1
    flip(place / SHARD)  # damage counts before it
    assert verify_checkpoint(tmp_path / "run", 1).state == "damaged"


def test_a_checkpoint_that_the_run_removes_meanwhile_is_no_fault(tmp_path, monkeypatch):
    save(tmp_path / "run", 1)
    original, lock = report.find_wrong_content, threading.Lock()

    def after_removal(place: Path, manifest: Manifest, names: list[str]):
        with lock:
            shutil.rmtree(place, ignore_errors=True)
        return original(place, manifest, names)

    monkeypatch.setattr(report, "find_wrong_content", after_removal)
    found = verify_checkpoint(tmp_path / "run", 1)
    assert found.state == "removed" and report.exit_code([found]) == 0
