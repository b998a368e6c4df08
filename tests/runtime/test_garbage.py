"""Collections are few while libraries are imported, and pass by what was imported after."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

STORY = """
import gc
usual, collections = gc.get_threshold(), []
from megappo.runtime.quiet import quiet_libraries
quiet_libraries()
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
made = [[] for _ in range(15_000)]
assert not collections, "what imports make is not visited again and again"

from megappo.runtime.garbage import freeze_imports
freeze_imports()
assert gc.get_freeze_count() > 15_000 and gc.get_threshold() == usual
later = [[] for _ in range(2 * usual[0])]
assert 0 in collections, "a run's own garbage is collected as ever"
assert len(gc.get_objects()) < 15_000, "and what was imported is left alone"
"""


def test_imports_are_collected_seldom_and_then_not_at_all() -> None:
    done = subprocess.run([sys.executable, "-c", STORY], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
