"""The image's lines work; a wheel is installed and used by tests/scripts/test_first_hour.py."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN_LINES = [line.removeprefix("RUN ") for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("RUN ")]


def call(*command: object, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MEGAPPO_"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=kept | environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done


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
