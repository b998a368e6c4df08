"""The Slurm that the other tests use ends with the process that started it, whatever ended that."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.commands.launch.guard import belonging

ROOT = Path(__file__).parents[3]
HOLDER = """
import sys, time
from pathlib import Path
from tests.commands.launch.cluster import two_nodes
with two_nodes(Path(sys.argv[1])) as cluster:
    cluster.command("sbatch", "--nodes=2", "--output=/dev/null", "--wrap", "srun sleep 300")
    print("ready", flush=True)
    time.sleep(300)
"""


def wait_until(condition: Callable[[], bool], timeout_s: float = 20) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def test_nothing_is_left_of_a_cluster_whose_owner_was_killed() -> None:
    with tempfile.TemporaryDirectory(prefix="megappo-slurm-", ignore_cleanup_errors=True) as folder:
        configuration = f"{folder}/slurm.conf"
        owner = subprocess.Popen([sys.executable, "-c", HOLDER, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
            assert wait_until(lambda: sum(process.name() == "sleep" for process in belonging(configuration)) == 2)
            names = [process.name() for process in belonging(configuration)]
            assert {"munged", "slurmctld", "slurmd", "slurmstepd", "srun"} <= set(names), names
        finally:
            owner.kill()
            owner.wait()
        assert wait_until(lambda: not belonging(configuration))
