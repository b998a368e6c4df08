"""Output of libraries at their import is kept from the user, and nothing else of theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# torch for CUDA looks for nvcc and a GPU when it is imported, torch for the CPU when it is asked to.
LOOK = """
from megappo.runtime.quiet import quiet_libraries
quiet_libraries()
quiet_libraries()
from torch.utils import cpp_extension
assert cpp_extension._find_cuda_home() == "/of/cuda"
cpp_extension.logger.warning("another warning")
(only,) = cpp_extension.logger.filters
cpp_extension.logger.removeFilter(only)
cpp_extension._find_cuda_home()
"""


def test_nvcc_without_a_gpu_is_no_warning() -> None:
    """Other warnings of that module stay; without the filter this one comes (the control)."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_HOME": "/of/cuda", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", LOOK], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    other, unfiltered = done.stderr.splitlines()
    assert "another warning" in other and "No CUDA runtime is found, using CUDA_HOME='/of/cuda'" in unfiltered
