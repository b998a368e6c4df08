"""scripts/setup_cuda_env.sh says in one line why it makes no environment, and whether that is an error."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cuda_environment import ROOT

TOOLS = ("awk", "bash", "cat", "cut", "df", "dirname", "env", "flock", "g++", "mkdir", "nvcc", "python3", "sha256sum", "touch")


def start(folder: Path, *options: str, without: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
    """The script with nothing on PATH but what it calls, on its way to a new environment in `folder`."""
    tools = folder / "bin"
    tools.mkdir()
    for name in TOOLS:
        where = shutil.which(name)
        if where is not None and name not in without:
            (tools / name).symlink_to(where)
    if "nvcc" not in without:  # only looked for
        (tools / "nvcc").unlink(missing_ok=True)
        (tools / "nvcc").symlink_to("/bin/true")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MEGAPPO_", "CUDA_", "PIP_"))}
    # PIP_: where the caller has pip look; CUDA_: his toolkit.
    environ |= {"PATH": str(tools), "MEGAPPO_CUDA_VENV": str(folder / "venv"), **variables}
    command = [ROOT / "scripts/setup_cuda_env.sh", *options]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def setup(folder: Path, *options: str, without: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """`start`, to its end."""
    process = start(folder, *options, without=without, **variables)
    said = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


@pytest.mark.parametrize(
    "without, variables, reason",
    [
        (("nvcc",), {}, "nvcc was not found (set CUDA_HOME or PATH to a CUDA toolkit)"),
        (("g++",), {}, "g++ was not found (Debian: apt-get install g++)"),
        (("python3",), {}, "no Python runs as python3.12 or python3.11 (set MEGAPPO_CUDA_PYTHON)"),
        ((), {"MEGAPPO_CUDA_PYTHON": "python4"}, "no Python runs as python4 (set MEGAPPO_CUDA_PYTHON)"),
        ((), {"MEGAPPO_CUDA_PYTHON": sys.executable, "MEGAPPO_CUDA_FREE_GIB": "9999999"}, "9999999 are needed"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    tmp_path: Path, without: tuple[str, ...], variables: dict[str, str], reason: str
) -> None:
    for options, status in (((), 2), (("--optional",), 0)):
        folder = tmp_path / str(status)
        folder.mkdir()
        done = setup(folder, *options, without=without, **variables)
        assert done.returncode == status, done.stderr
        assert done.stderr.startswith("setup-cuda: skipped: ") and done.stderr.rstrip().endswith(reason), done.stderr
        assert done.stderr.count("\n") == 1 and not list(folder.glob("venv/bin"))


def test_a_torch_that_is_not_to_be_had_is_said(tmp_path: Path) -> None:
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    done = setup(tmp_path, "--optional", MEGAPPO_CUDA_PYTHON=sys.executable, MEGAPPO_CUDA_FREE_GIB="1", **offline)
    assert done.returncode == 0 and "skipped: a CUDA build of torch 2.13.0 is not to be had" in done.stderr, done.stderr


def test_an_environment_that_is_not_there_is_not_made_on_the_way(tmp_path: Path) -> None:
    done = setup(tmp_path, "--existing")
    assert done.returncode == 3 and "there is no finished environment in" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_an_environment_that_is_being_made_is_waited_for(tmp_path: Path) -> None:
    """As scripts/test.sh makes it beside the tests."""
    (tmp_path / "venv").mkdir()
    with (tmp_path / "venv/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with start(tmp_path, "--existing") as process:
            while not any(child.name() == "flock" for child in psutil.Process(process.pid).children()):
                assert process.poll() is None, "it did not wait"
                time.sleep(0.01)
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert process.wait(60) == 3


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    done = setup(tmp_path, "--optinal")
    assert done.returncode == 2 and "--optinal: use --optional, --existing or --transformer-engine" in done.stderr
