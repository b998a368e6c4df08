"""Manifests that were torn, forged or signed, and files that cannot be looked at: which are damage, and which touch nothing."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path

import pytest
import torch.distributed as dist

from megappo.checkpoint import manifest as module
from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.manifest import (
    KEY_VARIABLE,
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    RefusedCheckpoint,
    UnsafeCheckpoint,
    fingerprint_file,
    list_files,
    read_manifest,
    write_manifest,
)
from megappo.checkpoint.state import load_components, read_components
from megappo.checkpoint.verification import verify
from megappo.commands.launch.environment import shown_variables
from tests.commands.runs.folders import FILES, save

MUTATIONS = 400


@pytest.fixture(scope="module", autouse=True)
def alone():
    """A world of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def without_a_key(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkpoint of one rank, as far as manifests go."""
    return save(tmp_path, 3)


def write(place: Path, files: dict, **changes) -> None:
    write_manifest(place, Manifest(**{"step": 3, "world_size": 1, "model_only": False, "facts": {}, "files": files} | changes))


def rewrite(place: Path, **changes) -> None:
    """A manifest with other content and the right checksum, as somebody who means harm would write it."""
    content = json.loads((place / MANIFEST).read_text())
    content.pop("sha256")
    content |= changes
    (place / MANIFEST).write_text(json.dumps({**content, "sha256": module._digest(module._canonical(content))}))


def verified(place: Path) -> Manifest:
    return verify(CheckpointDirectory(place.parent), 3)


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_whole_checkpoint_is_verified(place: Path) -> None:
    assert set(verified(place).files) == set(FILES)


# ------------------------------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
def test_every_changed_or_missing_file_is_damage(place: Path, name: str, how: str) -> None:
    path = place / name
    content = path.read_bytes()
    if how == "delete":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if how == "truncate" else content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    with pytest.raises(DamagedCheckpoint, match=name.rsplit("/", 1)[-1]):
        verified(place)


def test_a_missing_folder_of_a_model_is_damage(place: Path) -> None:
    (place / "models" / "policy").rename(place / "elsewhere")
    with pytest.raises(DamagedCheckpoint, match="is missing"):
        verified(place)


# -------------------------------------------------------------------------------------------------------------- I/O errors


def failing(monkeypatch, name: str, number: int) -> None:
    """Opening a file of this name fails as the kernel would report it. Permissions do not bind root, who runs these tests."""
    original = Path.open

    def opening(self, *args, **kwargs):
        if self.name == name:
            raise OSError(number, os.strerror(number), str(self))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", opening)


@pytest.mark.parametrize("name", ["state.json", "00000.safetensors", MANIFEST])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_an_io_error_is_no_damage_and_names_file_and_error(place: Path, monkeypatch, name: str, number: int) -> None:
    before = snapshot(place.parent)
    with monkeypatch.context() as patch, pytest.raises(RefusedCheckpoint) as refusal:
        failing(patch, name, number)
        verified(place)
    text = str(refusal.value)
    assert name in text and os.strerror(number) in text and "nothing was renamed" in text and "\n" not in text
    assert snapshot(place.parent) == before


def test_a_file_that_fails_while_it_is_read_is_named(place: Path, monkeypatch) -> None:
    """The error of read() does not say of which file."""

    def broken(path: Path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(module, "fingerprint_file", broken)
    with pytest.raises(RefusedCheckpoint, match=r"step-3/models/policy/\S+: Input/output error"):
        verified(place)


@pytest.mark.parametrize("entry", ["step-3", MANIFEST])
def test_a_directory_that_can_be_listed_and_not_searched_refuses(place: Path, monkeypatch, entry: str) -> None:
    """The checkpoints' own (its entry step-3 cannot be looked at), and that of a step."""
    original = Path.lstat

    def look(self):
        if self.name == entry:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return original(self)

    monkeypatch.setattr(Path, "lstat", look)
    with pytest.raises(RefusedCheckpoint, match="Permission denied; nothing was renamed"):
        CheckpointDirectory(place.parent).newest()


class Counter:
    """A component that counts in two numbers."""

    count = 0

    def state_dict(self) -> dict:
        return {"inner": {"count": self.count}, "kinds": ["a"]}

    def load_state_dict(self, state: dict) -> None:
        self.count = state["inner"]["count"] + len(state["kinds"][0])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[1, 2]", "state.json is a JSON list, not an object"),
        ("{", "state.json is not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"other": {}}', "holds the state of .'other'.*resume with the same megappo"),
        ('{"counter": null}', "the state of counter is not what megappo writes .TypeError"),
        ('{"counter": {"inner": {}}}', "the state of counter is not what megappo writes .KeyError"),
        ('{"counter": {"inner": {"count": 1}, "kinds": []}}', "the state of counter is not what megappo writes .IndexError"),
        ('{"counter": {"inner": {"count": "x"}, "kinds": ["a"]}}', "the state of counter is not what megappo writes .TypeError"),
    ],
)
def test_a_hostile_state_in_a_matching_manifest_is_one_line(place: Path, content: str, says: str) -> None:
    (place / "state.json").write_text(content)
    write(place, {name: fingerprint_file(place / name) for name in list_files(place)})
    components = {"counter": Counter()}
    with pytest.raises(ValueError, match=says) as refusal:
        load_components(components, read_components(place.parent / f"step-{verified(place).step}", components), place)
    assert "\n" not in str(refusal.value)


def test_a_folder_in_place_of_a_file_refuses(place: Path) -> None:
    """As the kernel reports it, without help of the test: the size is that of the file."""
    (place / MANIFEST).unlink()
    (place / MANIFEST).mkdir()
    with pytest.raises(RefusedCheckpoint, match="manifest.json: Is a directory"):
        verified(place)


def test_a_file_in_place_of_the_checkpoints_refuses(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(RefusedCheckpoint, match="checkpoints: Not a directory"):
        CheckpointDirectory(tmp_path / "checkpoints").newest()


def test_a_link_to_a_file_system_that_is_not_mounted_refuses(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(tmp_path / "not mounted")
    with pytest.raises(RefusedCheckpoint, match="No such file or directory; nothing was renamed"):
        CheckpointDirectory(tmp_path / "checkpoints").newest()
    assert CheckpointDirectory(tmp_path / "never made").newest() is None


# ------------------------------------------------------------------------------------------------------------------ forged


@pytest.mark.parametrize("left_out", FILES)
def test_a_manifest_that_leaves_out_a_file_is_refused(place: Path, left_out: str) -> None:
    files = json.loads((place / MANIFEST).read_text())["files"]
    del files[left_out]
    rewrite(place, files=files)
    with pytest.raises(UnsafeCheckpoint, match="leaves out"):
        verified(place)


@pytest.mark.parametrize("size", [2, 10**18])
def test_random_states_of_all_ranks_must_be_listed(place: Path, size: int) -> None:
    rewrite(place, world_size=size)
    with pytest.raises(UnsafeCheckpoint, match="leaves out rng-"):
        verified(place)


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "a/../b", "a\0b", ".", "", "a//b", "./a", "\ud800"])
def test_names_that_lead_elsewhere_are_refused(place: Path, name: str) -> None:
    files = json.loads((place / MANIFEST).read_text())["files"]
    rewrite(place, files={**files, name: {"bytes": 1, "blake3": "0" * 64}})
    with pytest.raises(UnsafeCheckpoint) as refusal:
        verified(place)
    assert "\n" not in str(refusal.value) and "no file below its directory" in str(refusal.value)


@pytest.mark.parametrize("linked", ["state.json", "models", "models/policy", MANIFEST, "."])
def test_links_are_refused_even_to_the_right_content(place: Path, tmp_path: Path, linked: str) -> None:
    path = place / linked
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafeCheckpoint, match="symbolic link"):
        verified(place)
    assert CheckpointDirectory(place.parent).steps() == ([] if linked == "." else [3])


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "3"},
        {"step": -1},
        {"step": True},
        {"world_size": 0},
        {"world_size": None},
        {"files": []},
        {"files": {"a": None}},
        {"files": {"a": [1, 2]}},
        {"files": {"a": {"bytes": 1}}},
        {"files": {"a": {"bytes": 1, "sha256": ""}}},
        {"files": {"a": {"bytes": "1", "blake3": ""}}},
        {"files": {"a": {"bytes": -1, "blake3": ""}}},
        {"facts": None},
        {"more": 1},
    ],
)
def test_other_types_are_one_line(place: Path, changes: dict) -> None:
    rewrite(place, **changes)
    with pytest.raises(UnsafeCheckpoint, match="not from megappo") as refusal:
        verified(place)
    assert "\n" not in str(refusal.value)


def test_another_format_is_not_damage(place: Path) -> None:
    """A newer megappo's checkpoint is not set aside by an older one."""
    rewrite(place, format=99)
    with pytest.raises(RefusedCheckpoint, match="another format"):
        verified(place)


def test_nesting_too_deep_for_python_is_one_line(place: Path) -> None:
    for depth in (900, 5_000, 200_000):
        (place / MANIFEST).write_text('{"facts": ' * depth + "1" + "}" * depth)
        with pytest.raises(ValueError) as refusal:
            read_manifest(place)
        assert "\n" not in str(refusal.value)


def test_no_mutation_raises_anything_else(place: Path) -> None:
    content, chosen = (place / MANIFEST).read_bytes(), random.Random(13)
    caught = 0
    for number in range(MUTATIONS):
        mutated = bytearray(content)
        for _ in range(chosen.choice((1, 1, 2, 8))):
            where = chosen.randrange(len(mutated))
            kind = chosen.randrange(3)
            if kind == 0:
                mutated[where] = chosen.randrange(256)
            elif kind == 1:
                del mutated[where : where + chosen.randrange(1, 40)]
            else:
                mutated[where:where] = chosen.choice((b"[", b"{", b'"', b"null", b"-1e999", b"\xff", b"\0", b"9" * 30))
        (place / MANIFEST).write_bytes(mutated)
        try:
            assert read_manifest(place) and mutated.split() == content.split(), number
        except (DamagedCheckpoint, RefusedCheckpoint) as error:
            caught += 1
            assert "\n" not in str(error)
    assert caught > 0.9 * MUTATIONS


# ------------------------------------------------------------------------------------------------------------------ signed


def test_a_signed_checkpoint_is_read_with_its_key_alone(place: Path, monkeypatch) -> None:
    """S3. Nothing is renamed: the checkpoint is whole, and may be somebody else's."""
    monkeypatch.setenv(KEY_VARIABLE, "correct horse")
    with pytest.raises(RefusedCheckpoint, match="is not signed"):
        verified(place)
    write(place, {name: fingerprint_file(place / name) for name in list_files(place)})
    verified(place)
    before = snapshot(place.parent)
    monkeypatch.setenv(KEY_VARIABLE, "battery staple")
    with pytest.raises(RefusedCheckpoint, match="was not signed with the key in MEGAPPO_CHECKPOINT_KEY") as refusal:
        verified(place)
    assert "staple" not in str(refusal.value) and "horse" not in (place / MANIFEST).read_text()
    with pytest.raises(RefusedCheckpoint):
        CheckpointDirectory(place.parent, owner="a1b2").newest()
    assert snapshot(place.parent) == before
    monkeypatch.delenv(KEY_VARIABLE)
    verified(place)  # nobody asked


def test_a_forged_manifest_with_the_right_checksum_is_refused_under_a_key(place: Path, monkeypatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "correct horse")
    write(place, {name: fingerprint_file(place / name) for name in list_files(place)})
    (place / "state.json").write_text("forged")
    files = json.loads((place / MANIFEST).read_text())["files"]
    forgery = fingerprint_file(place / "state.json")
    files["state.json"] = {"bytes": forgery.bytes, "blake3": forgery.digest}
    signature = json.loads((place / MANIFEST).read_text())["hmac"]
    content = json.loads((place / MANIFEST).read_text())
    content.pop("hmac")
    (place / MANIFEST).write_text(json.dumps(content))
    rewrite(place, files=files)
    for forged in (signature, "", None, 5, "é"):
        content = json.loads((place / MANIFEST).read_text())
        (place / MANIFEST).write_text(json.dumps({**content, "hmac": forged}))
        with pytest.raises(RefusedCheckpoint, match="signed"):
            verified(place)
    monkeypatch.delenv(KEY_VARIABLE)
    verified(place)  # the negative control: without a key the forgery is taken


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_a_mistake(place: Path, monkeypatch, key: str) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(RefusedCheckpoint, match="is set and empty"):
        verified(place)


def test_the_key_is_not_recorded() -> None:
    assert shown_variables({KEY_VARIABLE: "correct horse"}) == {KEY_VARIABLE: "(hidden)"}
