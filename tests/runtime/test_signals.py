"""Signals to one rank of a world: all ranks stop at the same step, and what a rank started does not notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from megappo.parallel.consensus import any_rank
from megappo.runtime.ending import StopRequest
from megappo.runtime.helper_process import deaf_to_stop, parent_to_follow
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
from megappo.runtime.ending import StopRequest
stop = StopRequest()
stop.listen()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
time.sleep(1)
before = stop.received
os.kill(child.pid, signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR1)
deadline = time.monotonic() + 50
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
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == -signal.SIGUSR1


# A launcher blocks TERM until the rank listens; a helper of the rank is deaf to all that asks for a stop, and ends with it.
RANK_WITH_HELPER = """
import os, subprocess, sys
from megappo.runtime.helper_process import deaf_to_stop, parent_to_follow
from megappo.runtime.ending import StopRequest
stop = StopRequest()
stop.listen()
helper = (
    "import sys, time; from megappo.runtime.helper_process import end_with; end_with(int(sys.argv[1]));"
    "print('begun', flush=True); time.sleep(60)"
)
with deaf_to_stop():
    child = subprocess.Popen([sys.executable, "-c", helper, str(parent_to_follow())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.readline()
print(stop.received.name, child.poll(), flush=True)
sys.stdin.readline()
"""


def test_a_helper_survives_requests_to_stop_and_ends_with_its_rank() -> None:
    with deaf_to_stop():  # as the launcher starts a rank
        rank = subprocess.Popen(
            [sys.executable, "-c", RANK_WITH_HELPER],
            env={"PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    assert rank.stdin is not None and rank.stdout is not None
    helper = psutil.Process(int(rank.stdout.readline()))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        helper.send_signal(number)
    rank.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    rank.stdin.write("\n")
    rank.stdin.flush()
    assert rank.stdout.readline() == "SIGTERM None\n"
    rank.kill()
    rank.wait()
    helper.wait(60)


# What vLLM's shared memory does in a rank: Python's resource tracker unblocks INT and TERM when it has started.
RANK_WITH_TRACKER = """
import os, signal, sys
from multiprocessing import resource_tracker
from megappo.runtime.helper_process import stay_deaf
from megappo.runtime.ending import StopRequest
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background, which ignores it
if sys.argv[1] == "deaf":
    stay_deaf()
stop = StopRequest()
stop.listen()
resource_tracker.ensure_running()
print("begun", flush=True)
sys.stdin.readline()
print(stop.received, flush=True)
"""


@pytest.mark.parametrize(
    ("how", "number", "said"), [("deaf", "INT", "None"), ("deaf", "TERM", "Signals.SIGTERM"), ("not", "INT", "")]
)
def test_a_rank_that_starts_the_resource_tracker_stays_deaf_to_the_terminal(how: str, number: str, said: str) -> None:
    """And still takes TERM for a request. Negative control: without `stay_deaf` Ctrl-C ends it."""
    with deaf_to_stop():
        rank = subprocess.Popen(
            [sys.executable, "-c", RANK_WITH_TRACKER, how],
            env={"PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    assert rank.stdout is not None and rank.stdout.readline() == "begun\n"
    rank.send_signal(signal.Signals[f"SIG{number}"])
    time.sleep(0.3)
    assert rank.communicate("\n")[0].strip().replace("15", "Signals.SIGTERM") == said


def test_a_helper_that_is_started_by_another_thread_does_not_follow_it() -> None:
    """The kernel follows that thread, which may be gone long before the rank."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(parent_to_follow()))
    thread.start()
    thread.join()
    assert found == [0] and parent_to_follow() == os.getpid()
