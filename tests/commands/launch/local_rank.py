"""Stands for a rank of `megappo train` on this machine, without torch; leaves a file when it has begun.

STUB has a word for each rank. exit-N, kill, raise; sleep: for a minute; stop: until it is asked to, and half a second; deaf: a
minute although it is asked to; late: listens after half a second, then as stop; goes-on: until the launcher has
noted that rank 1 is lost, and for longer than it waits after a failure; again-WORD: is killed, and is WORD when it
starts again: joins takes part, fails does not, twice; waits: until rank 1 has done so.
"""

import os
import signal
import sys
import time
from pathlib import Path

from megappo.runtime.ending import StopRequest
from megappo.runtime.failure import ATTEMPT_DIR, KILL_GRACE_S, end_of_lost, joining_as, note_joined, record_exceptions


def _is_gone(rank: int) -> bool:
    """True once the launcher has taken note of the rank's end."""
    begun = Path(os.environ["BEGUN"], str(rank))
    return begun.exists() and bool(pid := begun.read_text()) and not Path("/proc", pid).exists()


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    word = os.environ["STUB"].split()[rank]
    record_exceptions(rank)
    stop = StopRequest()
    if word in ("stop", "deaf"):
        stop.listen()
    Path(os.environ["BEGUN"], str(rank)).write_text(str(os.getpid()))
    if word.startswith("again-"):
        word = "kill" if joining_as(rank) is None else word.removeprefix("again-")
    done = Path(os.environ["BEGUN"], "2")
    if word == "joins":
        note_joined(Path(os.environ[ATTEMPT_DIR]), [rank])
    if word == "joins" or (word == "fails" and joining_as(rank) == "2"):
        done.write_text(str(os.getpid()))
    if word == "fails":
        raise RuntimeError("not for the others")
    if word == "joins":
        sys.exit(0)
    if word == "waits":
        while not done.exists():
            time.sleep(0.05)
        sys.exit(0)
    if word.startswith("exit-"):
        while rank > 0 and not _is_gone(rank - 1):  # rank after rank, on a busy machine too
            time.sleep(0.01)
        sys.exit(int(word.removeprefix("exit-")))
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "goes-on":
        while end_of_lost(Path(os.environ[ATTEMPT_DIR]), 1) is None:
            time.sleep(0.05)
        time.sleep(KILL_GRACE_S + 0.5)
        sys.exit(0)
    if word == "raise":
        raise RuntimeError("the culprit")
    if word == "late":
        time.sleep(0.5)
        stop.listen()
    until = time.monotonic() + 60
    while time.monotonic() < until and (stop.received is None or word == "deaf"):
        time.sleep(0.05)
    if word in ("stop", "late"):
        time.sleep(0.5)  # the rest of a step, and the save
