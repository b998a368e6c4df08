"""Choice of the nvcc that compiles the CUDA kernels: the one answer of the build (csrc/toolkit.py) and of `megappo doctor`.

csrc/ imports it before megappo or torch is installed: the standard library alone.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path


def nvcc_path() -> str | None:
    """nvcc of CUDA_HOME, else on PATH, else None."""
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin/nvcc").exists():
        return str(Path(home) / "bin/nvcc")
    return shutil.which("nvcc")


def release_of(said: str) -> str | None:
    """CUDA's version, like "13.0", in what `nvcc --version` prints; None if it names none."""
    found = re.search(r"release (\d+\.\d+)", said)
    return found.group(1) if found else None
