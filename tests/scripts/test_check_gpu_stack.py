"""The check of the GPU stack, once, row by row: every check that its files list ended, and none FAILED."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu_stack import capability, fake_device, library, pip_resolution, te_layers, triton_kernels, vllm_config
from scripts.gpu_stack.main import GROUPS
from tests.cuda_environment import ROOT, cuda_environment

MODULES = (library, capability, triton_kernels, pip_resolution, fake_device, vllm_config, te_layers)
NAMES = [(module.GROUP, name) for module in MODULES for name, _ in module.CHECKS]


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    cuda_environment()
    file = tmp_path_factory.mktemp("gpu_stack") / "rows.json"
    done = subprocess.run(["scripts/check_gpu_stack.sh", "--json", str(file)], cwd=ROOT, capture_output=True, text=True)
    assert file.exists(), done.stdout + done.stderr
    print(done.stdout)
    found = {(row["group"], row["name"]): row for row in json.loads(file.read_text())}
    # the exit status is the table's
    assert done.returncode == any(row["result"] == "FAILED" for row in found.values())
    return found


def test_what_needs_no_gpu_holds(rows: dict[tuple[str, str], Any]) -> None:
    failed = {name: rows[name]["detail"] for name in NAMES if rows[name]["result"] == "FAILED"}
    assert failed == {}
    assert set(rows) == set(NAMES)
    if skipped := {name: rows[name]["detail"] for name in NAMES if rows[name]["result"] == "skipped"}:
        pytest.skip(str(skipped))


def test_every_group_is_run() -> None:
    assert sorted(GROUPS) == sorted(module.GROUP for module in MODULES)
    files = {path.stem for path in (ROOT / "scripts/gpu_stack").glob("*.py") if 'if __name__ == "__main__"' in path.read_text()}
    assert files - {"main", "names", "sync"} == set(GROUPS)


def test_the_checkout_keeps_its_own_library(rows: dict[tuple[str, str], Any]) -> None:
    """The environment's megappo is the copy in its src/."""
    folder = cuda_environment()
    ask = [folder / "bin/python", "-c", "import megappo; print(megappo.__file__)"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    place = subprocess.run(ask, cwd="/", env=environ, capture_output=True, text=True, check=True).stdout
    assert Path(place.strip()).parent == (folder / "src/megappo").resolve()
