"""The environment that scripts/setup_cuda_env.sh makes, for tests that need a CUDA build of torch."""

from __future__ import annotations

import fcntl
import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def folder_of_environment() -> Path:
    """Where it is, or would be; one that scripts/test.sh is making meanwhile is waited for."""
    folder = ROOT / (os.environ.get("MEGAPPO_CUDA_VENV") or ".venv-cuda")
    if (folder / ".lock").exists():
        with (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
    return folder


@cache
def _brought_up_to_date() -> tuple[Path, str]:
    """(folder, why it cannot be used or "")"""
    folder = folder_of_environment()
    done = subprocess.run(["scripts/setup_cuda_env.sh", "--existing"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 2, 3):  # 2 and 3: it is not there, and cannot be made
        raise AssertionError(f"scripts/setup_cuda_env.sh ended with {done.returncode}: {done.stderr or done.stdout}")
    return folder, done.stderr.strip() if done.returncode else ""


def cuda_environment() -> Path:
    """Its folder, with this checkout's files and kernels in src/; skips the test, with the reason, where there is none."""
    folder, reason = _brought_up_to_date()
    if reason:
        pytest.skip(reason)
    return folder


def kernels_of_environment() -> Path | None:
    """Folder of the CUDA kernels that were compiled for it from this checkout's sources; None where there is none."""
    folder, reason = _brought_up_to_date()
    return None if reason else folder / "src/build/kernels"
