"""What is handed out: a source distribution becomes a wheel that runs in an environment of its own, and the image's lines work."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN_LINES = [line.removeprefix("RUN ") for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("RUN ")]


def call(*command: object, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MEGAPPO_"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=kept | environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip builds of the source distribution, which is made of what git tracks."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    call(sys.executable, "setup.py", "-q", "sdist", "-d", out, cwd=source)
    archive = next(out.glob("megappo-*.tar.gz"))
    with tarfile.open(archive) as file:
        parts = {Path(name).parts[1] for name in file.getnames() if len(Path(name).parts) > 2}
    assert parts == {"configs", "csrc", "megappo", "megappo.egg-info", "requirements"}
    call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, archive, cwd=out)
    return next(out.glob("megappo-*.whl"))


@pytest.mark.slow
def test_a_wheel_of_the_source_distribution_runs_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    for needed in ("_native.so", "recipes/grpo.yaml", "telemetry/hardware.yaml", "commands/launch/job.sbatch.jinja"):
        assert f"megappo/{needed}" in names, needed
    assert any(name.endswith("LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "csrc", "scripts", "benchmarks"))]
    venv = tmp_path / "venv"
    call(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    site = next(venv.glob("lib/python*/site-packages"))
    call(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    # The libraries are those of this environment; megappo is the wheel's, which comes first.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    python = venv / "bin/python"
    home = call(python, "-c", "import megappo; print(megappo.__file__)", cwd=tmp_path).stdout.strip()
    assert Path(home).is_relative_to(venv)
    assert "C++" in call(python, "-m", "megappo.ops.implementations", cwd=tmp_path).stdout
    (tmp_path / "run.yaml").write_text(call(python, "-m", "megappo", "config", "--recipe", "grpo", cwd=tmp_path).stdout)
    assert "usage: megappo" in call(python, "-m", "megappo", "--help", cwd=tmp_path).stdout
    assert "algorithm:" in (tmp_path / "run.yaml").read_text()


def test_every_line_of_the_image_is_executed_here_or_by_the_script_of_the_tests() -> None:
    packages, setup, command = RUN_LINES
    assert (
        setup == "scripts/setup_cuda_env.sh $SETUP"
        and "scripts/setup_cuda_env.sh --optional" in (ROOT / "scripts/test.sh").read_text()
    )
    call("bash", "-n", "-c", packages, cwd=ROOT)
    assert "usage: megappo" in call(sys.executable, "-m", *shlex.split(command), cwd=ROOT).stdout
    if shutil.which("apt-get") is None:
        pytest.skip("no apt-get: the image's packages cannot be looked up")
    wanted = packages.rpartition("--no-install-recommends ")[2].split()
    call("apt-get", "install", "--simulate", "--no-install-recommends", "-y", *wanted, cwd=ROOT)


def test_the_image_copies_no_environment_and_no_build() -> None:
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "build", "runs"} <= set(left_out)
