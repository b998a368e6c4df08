"""Hashes of files in chunks: what they are, that any change shows, and that checkpoints of format 1 are still read."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from megappo.checkpoint import hashing
from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.files import write_file
from megappo.checkpoint.hashing import hash_in_chunks, hash_plain
from megappo.checkpoint.manifest import MANIFEST, FileEntry, Manifest, find_wrong_content, read_manifest, write_manifest

CHUNK = 7
CONTENT = bytes(range(50))


def sha(data):
    return hashlib.sha256(data).digest()


@pytest.fixture
def short_chunks(monkeypatch):
    monkeypatch.setattr(hashing, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(hashing, "_READ_BYTES", 3)


def test_a_small_file_is_one_chunk(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    # SHA-256 of "abc", from FIPS 180-2, hashed again.
    inner = bytes.fromhex("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    assert hash_in_chunks(path, 2) == (3, hashlib.sha256(inner).hexdigest())
    path.write_bytes(b"")
    assert hash_in_chunks(path, 2) == (0, hashlib.sha256(b"").hexdigest())


@pytest.mark.parametrize("size", [6, 7, 8, 14, 50])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_hash_is_that_of_the_digests_of_the_chunks(tmp_path, short_chunks, size, threads):
    path = tmp_path / "file"
    path.write_bytes(CONTENT[:size])
    digests = [sha(CONTENT[start : min(size, start + CHUNK)]) for start in range(0, size, CHUNK)]
    assert hash_in_chunks(path, threads) == (size, hashlib.sha256(b"".join(digests)).hexdigest())


@pytest.mark.parametrize("cuts", [[50], [0, 1, 49], [7] * 7 + [1], [20, 0, 30], [1] * 50])
def test_writing_gives_the_hash_of_what_is_read_back(tmp_path, short_chunks, cuts):
    path, pieces, at = tmp_path / "file", [], 0
    for size in cuts:
        pieces.append(memoryview(CONTENT)[at : at + size])
        at += size
    with ThreadPoolExecutor(2) as pool:
        written = write_file(path, pieces, pool, 2)
    assert path.read_bytes() == CONTENT and written == hash_in_chunks(path, 1)


def test_a_flipped_bit_anywhere_is_found(tmp_path, short_chunks):
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    right = hash_in_chunks(path, 3)
    for bit in range(8 * len(CONTENT)):
        wrong = bytearray(CONTENT)
        wrong[bit // 8] ^= 1 << bit % 8
        path.write_bytes(wrong)
        assert hash_in_chunks(path, 1) != right
    path.write_bytes(CONTENT[CHUNK : 2 * CHUNK] + CONTENT[:CHUNK] + CONTENT[2 * CHUNK :])
    assert hash_in_chunks(path, 3).sha256 != right.sha256, "two chunks changed places"


def test_a_checkpoint_of_format_1_is_still_verified(tmp_path):
    place = tmp_path / "step-4"
    place.mkdir()
    (place / "weights").write_bytes(b"abc")
    size, plain = hash_plain(place / "weights", 1)
    assert plain == hashlib.sha256(b"abc").hexdigest() != hash_in_chunks(place / "weights", 1).sha256
    write_manifest(place, Manifest(4, 1, False, {}, {"weights": FileEntry(size, plain)}, format=1))
    assert json.loads((place / MANIFEST).read_text())["format"] == 1
    manifest = CheckpointDirectory(tmp_path).read(4)
    assert find_wrong_content(place, manifest, ["weights"]) is None
    (place / "weights").write_bytes(b"abd")
    assert "weights" in str(find_wrong_content(place, manifest, ["weights"]))


def test_a_format_of_the_future_is_refused(tmp_path):
    write_manifest(tmp_path, Manifest(4, 1, False, {}, {}, format=3))
    with pytest.raises(ValueError, match="has another format than"):
        read_manifest(tmp_path)
