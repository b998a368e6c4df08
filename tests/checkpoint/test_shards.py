"""Files of boxes: read back in any cut, refused if they are none, whatever is changed in them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megappo.checkpoint.image import FileImage
from megappo.checkpoint.manifest import UnsafeCheckpoint
from megappo.checkpoint.shards import StoredTensors, _content
from megappo.checkpoint.state import StateBox

WHOLE = torch.arange(60.0).view(10, 6)
MUTATIONS = 400


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tensor of 10 x 6 in three files, cut by rows and by columns, and one of bf16 in the last."""
    cuts = [[(0, 0, WHOLE[:4])], [(4, 0, WHOLE[4:, :5])], [(4, 5, WHOLE[4:, 5:])]]
    for number, cut in enumerate(cuts):
        boxes = [StateBox("a", *box) for box in cut]
        if number == 2:
            boxes.insert(0, StateBox("b", 0, 0, torch.ones(3, 1, dtype=torch.bfloat16)))
        (tmp_path / f"{number:05d}.safetensors").write_bytes(b"".join(FileImage("", _content(boxes)).content()))
    (tmp_path / "position.json").write_text('{"updates": 3}')
    return tmp_path


def test_every_box_is_read_from_whatever_cut(directory: Path) -> None:
    stored = StoredTensors(directory)
    assert stored.shapes == {"a": (10, 6), "b": (3, 1)} and stored.position == {"updates": 3}
    for row in range(10):
        for col in range(6):
            for rows, cols in ((1, 1), (10 - row, 6 - col), (min(3, 10 - row), 1)):
                into = torch.full((rows, 2 * cols), -1.0)[:, ::2]  # not contiguous
                stored.fill([StateBox("a", row, col, into)])
                assert torch.equal(into, WHOLE[row : row + rows, col : col + cols])
    rounded = torch.zeros(10, 6, dtype=torch.bfloat16)
    stored.fill([StateBox("a", 0, 0, rounded)])
    assert torch.equal(rounded, WHOLE.bfloat16())


def test_any_reader_of_safetensors_opens_a_file(directory: Path) -> None:
    found = load_file(directory / "00001.safetensors")
    assert found.keys() == {"a@4,0"} and torch.equal(found["a@4,0"], WHOLE[4:, :5])


@pytest.mark.parametrize("box", [("a", 9, 0, 2, 1), ("a", 0, 6, 1, 1), ("c", 0, 0, 1, 1)])
def test_a_box_that_is_not_all_there_is_refused(directory: Path, box: tuple[str, int, int, int, int]) -> None:
    key, row, col, rows, cols = box
    with pytest.raises(ValueError, match=f"{key} holds . of {rows * cols} numbers"):
        StoredTensors(directory).fill([StateBox(key, row, col, torch.zeros(rows, cols))])


def test_an_element_that_is_stored_twice_is_refused(directory: Path) -> None:
    (directory / "00003.safetensors").write_bytes((directory / "00001.safetensors").read_bytes())
    with pytest.raises(ValueError, match="a holds 90 of 60 numbers"):
        StoredTensors(directory).fill([StateBox("a", 0, 0, torch.zeros(10, 6))])


def test_a_mutated_file_is_read_or_refused_and_raises_nothing_else(directory: Path) -> None:
    """S1. Headers and positions alike: nothing is run, and no byte outside of the files is read."""
    random_bytes, refused = random.Random(0), 0
    for name in ("00002.safetensors", "position.json"):
        path, whole = directory / name, (directory / name).read_bytes()
        for _ in range(MUTATIONS):
            content = bytearray(whole)
            for _ in range(random_bytes.randint(1, 3)):
                content[random_bytes.randrange(min(len(content), 160))] = random_bytes.randrange(256)
            path.write_bytes(content[: random_bytes.choice((len(content), random_bytes.randrange(len(content) + 1)))])
            try:
                StoredTensors(directory).fill([StateBox("a", 0, 0, torch.zeros(10, 6))])
            except UnsafeCheckpoint as refusal:
                refused += 1
                assert "not from megappo" in str(refusal)
            except ValueError as error:
                assert "numbers that are read from it" in str(error)
        path.write_bytes(whole)
    assert refused > MUTATIONS
