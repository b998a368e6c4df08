"""The plan's verdict on a checkpoint, from its headers (`damaged.py` has the table), and what it says that training leaves out.
That the import's verdict is the same: `tests/engine/test_damaged.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megappo.models.hf_config import arch_for
from megappo.models.weight_check import check_headers
from tests.models.checkpoints import COMPOSITE
from tests.models.damaged import ANY, CASES, DAMAGES, FILES, FP8, ROWS, engines_of, verdict_of_plan, write_cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damaged")
    write_cases(path)
    return path


@pytest.mark.parametrize("damage", DAMAGES)
def test_headers_tell_what_training_would_refuse(folder, damage: str) -> None:
    says, rows = DAMAGES[damage][3], [row[1:] for row in ROWS if row[0] == damage]
    assert rows
    for case, value_head in rows:
        for engine in engines_of(case):
            found = verdict_of_plan(folder / damage / case, engine, value_head)
            assert (says in found and str(folder / damage / case) in found and "\n" not in found) if says else found == "", found


@pytest.mark.parametrize("name", FILES)
def test_files_that_cannot_be_read_are_named(folder, name: str) -> None:
    assert FILES[name] in verdict_of_plan(folder / name, "megatron", None)


def left_out(folder: Path, damage: str, case: str, value_head: Any) -> tuple[str | None, tuple[str, ...]]:
    path = folder / damage / case
    found = check_headers(path, arch_for(path, engines_of(case)[-1]), value_head)
    return found.head, found.others


def test_what_training_leaves_out_is_listed(folder) -> None:
    """A vision tower, scales of activations and what a value model has no use for are no news."""
    for case in CASES:
        assert [left_out(folder, "none", case, head) for head in (None, "zero")] == [(None, ())] * 2, case
    assert left_out(folder, "tensors of no layer", "llama", None) == (None, ("model.layers.1.mlp.up_proj.bias [96]",))
    for case in ("llama", COMPOSITE, ANY):
        assert [left_out(folder, "a value head", case, head) for head in ("zero", "normal")] == [("score.weight", ())] * 2
        assert left_out(folder, "a value head", case, "checkpoint") == (None, ())
    assert left_out(folder, "a value head", "llama", None) == (None, ("score.weight [1, 64]",))
    assert left_out(folder, "TRL's value head", "llama", "zero") == ("v_head.summary.weight", ())
    assert left_out(folder, "another lm_head, which no critic reads", "qwen2_tied", "zero") == (None, ())


def test_headers_need_no_torch(folder) -> None:
    """`arch_for` of a family needs none either."""
    text = (
        "import sys; sys.modules['torch'] = None\n"
        "from megappo.models.hf_config import read_arch\n"
        "from megappo.models.weight_check import check_headers\n"
        "for path in sys.argv[1:]: print(check_headers(path, read_arch(path), 'zero'))"
    )
    paths = [str(folder / "none" / case) for case in ("llama", FP8, COMPOSITE)]
    done = subprocess.run([sys.executable, "-c", text, *paths], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["LeftOut(head=None, others=())"] * 3, done.stderr
