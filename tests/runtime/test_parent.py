"""A rank ends with the launcher that started it, and one that somebody started by hand does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megappo.runtime.lease import LAUNCHER_VARIABLE

RANK = """
import time
from megappo.runtime.world import end_with_launcher
end_with_launcher()
print("ready", flush=True)
time.sleep(60)
"""
LAUNCHER = (
    f"import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', {RANK!r}]).pid, flush=True); time.sleep(60)"
)
SLURM = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "n1",
}


def without_launcher() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "SLURM", "MEGAPPO"))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("started_by", "ends"),
    [({"TORCHELASTIC_RUN_ID": "x"}, True), (SLURM, True), ({"RANK": "0", "WORLD_SIZE": "2"}, False)],
    ids=["torchrun", "srun", "by hand"],
)
def test_a_rank_ends_with_the_launcher_that_started_it(started_by: dict[str, str], ends: bool) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], env=without_launcher() | started_by, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    rank = psutil.Process(int(launcher.stdout.readline()))
    try:
        assert launcher.stdout.readline() == "ready\n"
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        deadline = time.monotonic() + (30 if ends else 0.5)
        while lives(rank) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert lives(rank) != ends
    finally:
        launcher.kill()
        launcher.stdout.close()
        if lives(rank):
            rank.kill()


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_rank_whose_launcher_ended_before_it_could_ask_ends_too() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    environment = without_launcher() | {"TORCHELASTIC_RUN_ID": "x", LAUNCHER_VARIABLE: str(ended.pid)}
    done = subprocess.run([sys.executable, "-c", RANK], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and done.stdout == "" and done.stderr == "megappo: the launcher of this rank has ended\n"
