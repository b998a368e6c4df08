"""The Slurm that the other tests use ends with the process that started it, whatever ended that."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.launch import guard
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


def test_a_slurmstepd_that_hangs_without_a_task_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name and its tasks are all that the guard looks at: a shell of that name stands for it."""
    program = shutil.copy("/bin/bash", tmp_path / "slurmstepd")
    configuration = f"{tmp_path}/slurm.conf"
    start = {"env": {"SLURM_CONF": configuration}, "stdin": subprocess.PIPE}
    with (
        subprocess.Popen([program, "-c", "read"], **start) as hung,
        subprocess.Popen([program, "-c", "/bin/cat <&0 & wait"], **start) as busy,
    ):
        assert wait_until(lambda: len(belonging(configuration)) == 3)
        without_tasks: dict = {}
        guard.end_hung_steps(configuration, without_tasks)
        assert [process.pid for process in without_tasks] == [hung.pid] and hung.poll() is None
        monkeypatch.setattr(guard, "HUNG_S", 0.0)
        guard.end_hung_steps(configuration, without_tasks)
        assert hung.wait(20) == -signal.SIGKILL and busy.poll() is None
        assert busy.stdin is not None
        busy.stdin.close()
        assert busy.wait(20) == 0
