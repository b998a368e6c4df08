"""The command that builds TransformerEngine, as its dry run prints it, for environments that can and cannot have it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "install_transformer_engine.sh"
HEADERS = {"cu13": "cublas_v2.h", "cudnn": "cudnn.h", "nccl": "nccl.h"}


def environment(
    place: Path, *, cuda: str | None = "'13.0'", toolkit: str = "13.0", headers: dict[str, str] = HEADERS
) -> dict[str, str]:
    """Variables under which `sys.executable` finds a torch, the headers of its wheels and an nvcc that only tell who they are."""
    (place / "torch").mkdir(parents=True)
    (place / "torch" / "__init__.py").write_text(f"__version__ = '2.13.0+cpu'\nclass version:\n    cuda = {cuda}\n")
    (place / "nvidia").mkdir()
    # A package and no namespace: folders of the environment's own wheels, where its torch is one for CUDA, are not found besides.
    (place / "nvidia" / "__init__.py").touch()
    for folder, header in headers.items():
        (place / "nvidia" / folder / "include").mkdir(parents=True)
        (place / "nvidia" / folder / "include" / header).touch()
    (place / "toolkit" / "bin").mkdir(parents=True)
    nvcc = place / "toolkit" / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {toolkit}, V{toolkit}.1'\n")
    nvcc.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name != "CPLUS_INCLUDE_PATH"}
    return {**kept, "PYTHONPATH": str(place), "CUDA_HOME": str(place / "toolkit")}


def dry_run(env: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPT), "--dry-run", "--python", sys.executable, *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_the_command_names_version_framework_and_existing_folders(tmp_path) -> None:
    done = dry_run(environment(tmp_path), "--archs", "90;100", "--jobs", "3")
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    settings = dict(word.split("=", 1) for word in words[1 : words.index(sys.executable)])
    assert settings["NVTE_FRAMEWORK"] == "pytorch" and settings["NVTE_CUDA_ARCHS"] == "90;100" and settings["MAX_JOBS"] == "3"
    assert settings["CUDA_HOME"] == str(tmp_path / "toolkit")
    folders = settings["CPLUS_INCLUDE_PATH"].split(":")
    assert [Path(folder).parent.name for folder in folders] == list(HEADERS)
    assert all(Path(folder).is_dir() for folder in folders)
    assert words[-2:] == ["--no-build-isolation", "transformer_engine[pytorch,core_cu13]==2.11.0"]


def test_the_number_of_compilers_is_bounded_by_memory_and_cores(tmp_path) -> None:
    words = shlex.split(dry_run(environment(tmp_path)).stdout)
    (jobs,) = [word.split("=")[1] for word in words if word.startswith("MAX_JOBS=")]
    assert 1 <= int(jobs) <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    "changes, told",
    [
        (dict(cuda=None), "torch 2.13.0+cpu is a build for the CPU: pip install 'torch===2.13.0' first"),
        (dict(toolkit="12.8"), "is of CUDA 12, torch of CUDA 13: set CUDA_HOME to a toolkit of CUDA 13"),
        (dict(headers={"cu13": "cublas_v2.h", "nccl": "nccl.h"}), "cudnn.h is in none of"),
    ],
)
def test_what_cannot_build_it_is_refused_in_one_line(tmp_path, changes, told) -> None:
    done = dry_run(environment(tmp_path, **changes))
    assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("options, told", [(["--archs"], "--archs needs a value"), (["--fast"], "unknown option --fast")])
def test_a_wrong_option_is_refused(options, told) -> None:
    done = subprocess.run([str(SCRIPT), *options], capture_output=True, text=True)
    assert done.returncode == 2 and told in done.stderr
