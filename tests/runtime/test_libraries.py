"""Libraries at their import: what they print, what is collected meanwhile; and freed memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# torch for CUDA looks for nvcc and a GPU when it is imported, torch for the CPU when it is asked to.
LOOK = """
from megappo.runtime.libraries import quiet_libraries
quiet_libraries()
quiet_libraries()
from torch.utils import cpp_extension
assert cpp_extension._find_cuda_home() == "/of/cuda"
cpp_extension.logger.warning("another warning")
(only,) = cpp_extension.logger.filters
cpp_extension.logger.removeFilter(only)
cpp_extension._find_cuda_home()
"""


@pytest.mark.slow
def test_nvcc_without_a_gpu_is_no_warning() -> None:
    """Other warnings of that module stay; without the filter this one comes (the control)."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_HOME": "/of/cuda", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", LOOK], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    other, unfiltered = done.stderr.splitlines()
    assert "another warning" in other and "No CUDA runtime is found, using CUDA_HOME='/of/cuda'" in unfiltered


STORY = """
import gc
usual, collections = gc.get_threshold(), []
from megappo.runtime.libraries import quiet_libraries
quiet_libraries()
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
made = [[] for _ in range(15_000)]
assert not collections, "what imports make is not visited again and again"

from megappo.runtime.libraries import freeze_imports
freeze_imports()
assert gc.get_freeze_count() > 15_000 and gc.get_threshold() == usual
later = [[] for _ in range(2 * usual[0])]
assert 0 in collections, "a run's own garbage is collected as ever"
assert len(gc.get_objects()) < 15_000, "and what was imported is left alone"
"""


def test_imports_are_collected_seldom_and_then_not_at_all() -> None:
    done = subprocess.run([sys.executable, "-c", STORY], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Pages of 16 blocks of 4 MiB that the system clears, when a process allocates them for the third time.
PROGRAM = """
import resource
from megappo.runtime.libraries import keep_freed_memory

{call}
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * (4 << 20) for _ in range(16)]
    cleared = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del blocks
print(cleared)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="malloc's rules are glibc's")
def test_pages_that_were_freed_are_not_cleared_anew() -> None:
    def cleared(call: str) -> int:
        return int(subprocess.check_output([sys.executable, "-c", PROGRAM.format(call=call)], text=True))

    assert cleared("assert keep_freed_memory()") < 100
    assert cleared("") > 5000, "by malloc's own rule 64 MiB are cleared again"
