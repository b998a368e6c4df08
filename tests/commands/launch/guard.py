"""Ends everything that belongs to a test's Slurm once its standard input is closed: by the fixture, or because pytest is gone.

    python guard.py SLURM_CONF

A job outlives slurmd by design, and a killed pytest runs no fixture to its end. Daemons, steps and ranks are told from others by
the SLURM_CONF that they were started with.
"""

import contextlib
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


def main(configuration: str) -> None:
    sys.stdin.read()
    # Several rounds: what is killed may have been about to start something.
    while processes := belonging(configuration):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1])
