"""The newest Megatron-core of the tested range trains as the pinned one: the first steps of the golden curves in every layout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megappo.runtime.versions import range_of
from tests.parity.test_replay import CURVE_TOLERANCE

NEWEST = "0.19.2"
ROOT = Path(__file__).resolve().parents[2]


def test_the_newest_megatron_core_is_on_the_golden_curves(tmp_path: Path) -> None:
    """Its wheels ask for Python 3.12; what a CPU run imports of them is Python that 3.11 reads."""
    wheel = [
        "--python-version",
        "3.12",
        "--only-binary",
        ":all:",
        "--no-deps",
        "--ignore-requires-python",
        "--target",
        str(tmp_path),
        f"megatron-core=={NEWEST}",
    ]
    subprocess.run([sys.executable, "-m", "pip", "install", "-qq", *wheel], check=True, timeout=300)
    assert range_of("megatron-core").endswith(f"<0.{int(NEWEST.split('.')[1]) + 1}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    used = "import megatron.core as core; print(core.__version__)"
    run = {"cwd": ROOT, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", used], **run).stdout.split()[-1] == NEWEST
    ask = "from tests.parity.replay import distance_to_golden; print(distance_to_golden(steps=4))"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", ask], **run, timeout=900)
    assert found.returncode == 0, found.stdout[-3000:]
    assert float(found.stdout.split()[-1]) <= CURVE_TOLERANCE
