"""Signals to one rank of a world: all ranks stop at the same step, and what a rank started does not notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megappo.parallel.consensus import any_rank
from megappo.resilience.signals import StopRequest
from tests.worlds import spawn_world

STEPS = 6
CHILD = [sys.executable, "-c", "import time; time.sleep(30)"]


def steps_until_stop(rank: int) -> tuple[int, str | None]:
    stop = StopRequest()
    stop.listen()
    for step in range(1, STEPS + 1):
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # a second one changes nothing
        if any_rank(stop.received is not None):
            return step, stop.received and stop.received.name
    return STEPS + 1, None


def test_all_ranks_stop_at_the_step_at_which_one_was_asked_to() -> None:
    assert spawn_world(steps_until_stop, 2) == [(3, None), (3, "SIGTERM")]


# USR1 as Slurm sends it: to the process and what it started, while the process computes; ignored until then, as by the script.
LISTENER = """
import os, signal, subprocess, sys, time
from megappo.resilience.signals import StopRequest
stop = StopRequest()
stop.listen()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
time.sleep(1)
before = stop.received
os.kill(child.pid, signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR1)
deadline = time.monotonic() + 10
while stop.received is None and time.monotonic() < deadline:
    sum(range(1000))
alive = child.poll() is None
child.terminate()
print(before, stop.received.name, alive, child.wait())
"""


def test_usr1_is_taken_by_the_rank_and_not_noticed_by_its_children() -> None:
    """TERM still ends them."""
    done = subprocess.run(
        ["bash", "-c", 'trap "" USR1; exec "$@"', "rank", sys.executable, "-c", LISTENER],
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["None", "SIGUSR1", "True", str(-signal.SIGTERM)], done.stderr


def test_without_listening_usr1_ends_a_process() -> None:
    """Negative control: the signal of the test above is deadly otherwise."""
    process = subprocess.Popen(CHILD)
    time.sleep(0.5)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(10) == -signal.SIGUSR1
