"""Hashes of files in chunks: what they are, and that any change shows."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from blake3 import blake3

from megappo.checkpoint import files
from megappo.checkpoint.files import hash_file, write_file
from megappo.checkpoint.manifest import FORMAT, MANIFEST, Manifest, read_manifest, write_manifest

CHUNK = 7
CONTENT = bytes(range(50))


@pytest.fixture
def short_chunks(monkeypatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(files, "_READ_BYTES", 3)


def test_a_small_file_is_one_chunk(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    # BLAKE3 of "abc" and of nothing, from the paper's authors; the first is hashed again.
    inner = bytes.fromhex("6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85")
    assert hash_file(path, 2) == (3, blake3(inner).hexdigest())
    path.write_bytes(b"")
    assert hash_file(path, 2) == (0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262")


@pytest.mark.parametrize("size", [6, 7, 8, 14, 50])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_hash_is_that_of_the_digests_of_the_chunks(tmp_path, short_chunks, size, threads):
    path = tmp_path / "file"
    path.write_bytes(CONTENT[:size])
    digests = [blake3(CONTENT[start : min(size, start + CHUNK)]).digest() for start in range(0, size, CHUNK)]
    assert hash_file(path, threads) == (size, blake3(b"".join(digests)).hexdigest())


@pytest.mark.parametrize("cuts", [[50], [0, 1, 49], [7] * 7 + [1], [20, 0, 30], [1] * 50])
def test_writing_gives_the_hash_of_what_is_read_back(tmp_path, short_chunks, cuts):
    path, pieces, at = tmp_path / "file", [], 0
    for size in cuts:
        pieces.append(memoryview(CONTENT)[at : at + size])
        at += size
    with ThreadPoolExecutor(2) as pool:
        written = write_file(path, pieces, pool, 2)
    assert path.read_bytes() == CONTENT and written == hash_file(path, 1)


def test_a_flipped_bit_anywhere_is_found(tmp_path, short_chunks):
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    right = hash_file(path, 3)
    for bit in range(8 * len(CONTENT)):
        wrong = bytearray(CONTENT)
        wrong[bit // 8] ^= 1 << bit % 8
        path.write_bytes(wrong)
        assert hash_file(path, 1) != right
    path.write_bytes(CONTENT[CHUNK : 2 * CHUNK] + CONTENT[:CHUNK] + CONTENT[2 * CHUNK :])
    assert hash_file(path, 3).digest != right.digest, "two chunks changed places"


def test_a_format_of_the_future_is_refused(tmp_path):
    write_manifest(tmp_path, Manifest(4, 1, False, {}, {}))
    content = json.loads((tmp_path / MANIFEST).read_text()) | {"format": FORMAT + 1}
    del content["sha256"]
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="has another format than"):
        read_manifest(tmp_path)
