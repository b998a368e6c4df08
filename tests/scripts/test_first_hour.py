"""scripts/first_hour.sh: docs/own_task.md and the mistakes of a newcomer, in an environment of its own, from the wheel of the
source distribution."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from csrc.build import _cxx
from tests.test_package import ROOT, call


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the source distribution, which is made of what git tracks, by the build backend that pip calls."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    backend = "from setuptools import build_meta; build_meta."
    call(sys.executable, "-c", f"{backend}build_sdist({str(out)!r})", cwd=source)
    archive = next(out.glob("megappo-*.tar.gz"))
    with tarfile.open(archive) as file:
        parts = {Path(name).parts[1] for name in file.getnames() if len(Path(name).parts) > 2}
        file.extractall(out, filter="data")
    assert parts == {"configs", "csrc", "megappo", "megappo.egg-info", "requirements"}
    compiler = out / "c++"  # unoptimised, in half of the time: how fast the kernels are is not asked here
    compiler.write_text(f'#!/bin/sh\nexec {_cxx()} "$@" -O0\n')
    compiler.chmod(0o755)
    unpacked = out / archive.name.removesuffix(".tar.gz")
    call(sys.executable, "-c", f"{backend}build_wheel({str(out)!r})", cwd=unpacked, CXX=str(compiler))
    return next(out.glob("megappo-*.whl"))


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    for needed in ("_native.so", "recipes/grpo.yaml", "telemetry/hardware.yaml", "commands/launch/job.sbatch.jinja"):
        assert f"megappo/{needed}" in names, needed
    assert any(name.endswith("LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "csrc", "scripts", "benchmarks"))]


def test_every_step_of_the_first_hour_passes(wheel: Path) -> None:
    done = subprocess.run([ROOT / "scripts/first_hour.sh", wheel], capture_output=True, text=True, errors="replace")
    print(done.stdout, done.stderr)
    steps = [line.split(" ")[0] for line in done.stdout.splitlines() if line.startswith(("PASS", "FAIL"))]
    assert done.returncode == 0 and len(steps) == 20 and set(steps) == {"PASS"}


def test_a_step_that_sees_something_else_fails(tmp_path: Path) -> None:
    """Negative control: the script's own function."""
    script = (ROOT / "scripts/first_hour.sh").read_text("utf-8")
    step = script[script.index("step() {") : script.index("# mistake NAME")]
    for line, failed in (
        ("0 yes echo yes", 0),
        ("0 no echo yes", 1),
        ("2 yes echo yes", 1),
        ("0 yes echo yes; echo Traceback", 1),
    ):
        code = line.split(" ")[0]
        command = f"step name {code} {line.split(' ')[1]} bash -c '{' '.join(line.split(' ')[2:])}'"
        done = subprocess.run(
            ["bash", "-euc", f"folder={tmp_path} failed=0\n{step}\n{command}\nexit $failed"], capture_output=True, text=True
        )
        assert done.returncode == failed, (line, done.stdout, done.stderr)
