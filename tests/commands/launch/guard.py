"""Ends everything that belongs to a test's Slurm once its standard input is closed: by the fixture, or because pytest is gone.

    python guard.py SLURM_CONF

A job outlives slurmd by design, and a killed pytest runs no fixture to its end. Daemons, steps and ranks are told from others by
the SLURM_CONF that they were started with. Until then it ends every slurmstepd that hangs: Slurm's sometimes waits for ever for a
lock of its own after its last task, and its node takes no further job.
"""

import contextlib
import select
import sys
import time
from pathlib import Path

import psutil


def belonging(configuration: str) -> list[psutil.Process]:
    mark = f"SLURM_CONF={configuration}".encode()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # it has just ended, or is another user's
            # Not by psutil: slurmstepd writes its title over the first variables, and psutil reads up to the first empty one.
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if mark in variables and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


# Longer than a slurmstepd without tasks waits for that of another node (60 s).
HUNG_S = 75.0


def end_hung_steps(configuration: str, without_tasks: dict[psutil.Process, float]) -> None:
    """Kill each slurmstepd that has had no task for `HUNG_S` seconds. without_tasks: since when, by the last call; is updated."""
    before = dict(without_tasks)
    without_tasks.clear()
    for process in belonging(configuration):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == "slurmstepd" and not process.children():
                without_tasks[process] = before.get(process, time.monotonic())
                if time.monotonic() - without_tasks[process] > HUNG_S:
                    process.kill()


def main(configuration: str) -> None:
    without_tasks: dict[psutil.Process, float] = {}
    while not select.select([sys.stdin], [], [], 5.0)[0]:
        end_hung_steps(configuration, without_tasks)
    # Several rounds: what is killed may have been about to start something.
    while processes := belonging(configuration):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1])
