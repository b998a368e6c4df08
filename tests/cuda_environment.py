"""The environment that scripts/setup_cuda_env.sh makes, for tests that need a CUDA build of torch."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@cache
def _brought_up_to_date() -> tuple[Path, str]:
    """(folder, why it cannot be used or "")"""
    folder = Path(os.environ.get("MEGAPPO_CUDA_VENV", ".venv-cuda"))
    done = subprocess.run(["scripts/setup_cuda_env.sh", "--existing"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 2, 3):  # 2 and 3: it is not there, and cannot be made
        raise AssertionError(f"scripts/setup_cuda_env.sh ended with {done.returncode}: {done.stderr or done.stdout}")
    return ROOT / folder, done.stderr.strip() if done.returncode else ""


def cuda_environment() -> Path:
    """Its folder, with this checkout's files and kernels in src/; skips the test, with the reason, where there is none."""
    folder, reason = _brought_up_to_date()
    if reason:
        pytest.skip(reason)
    return folder
