"""Starts the ranks of a command on this machine or on this node, by torchrun in this process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from megappo.config.checks import STOPPED

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: the run was asked to stop, has saved, and can be resumed
# Seconds that ranks have to end after one of them failed, before they are killed: they may wait for the dead one for ever.
SHUTDOWN_S = 5


def start_ranks(num_ranks: int, arguments: Sequence[str], module: str = "megappo.cli") -> int:
    """Run `megappo ARGUMENTS` (or another module) on `num_ranks` ranks by torchrun, which chooses a free port.

    Returns the exit code. ValueError where the machine has GPUs, but fewer than ranks.
    """
    from megappo.platform.device import check_gpus

    check_gpus(num_ranks)
    # torchrun would set 1 thread and warn about it; each rank gets its share of the cores instead.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // num_ranks)))
    handler = signal.signal(signal.SIGUSR1, _hand_on)
    try:
        return run_torchrun(["--standalone", "--nproc-per-node", str(num_ranks), "-m", module, *arguments])
    finally:
        signal.signal(signal.SIGUSR1, handler)


def stopped_or(code: int, run_dir: Path) -> int:
    """Exit code of a command whose ranks ended with `code`, which is 0 after a stop too."""
    return EXIT_STOPPED if code == 0 and (run_dir / STOPPED).exists() else code


def run_torchrun(arguments: Sequence[str]) -> int:
    """torchrun's own command line. Returns the exit code of the rank that failed first on this node, or 0."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # Its own records of a failing rank say less than the rank's traceback.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(list(arguments)))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"megappo: rank {rank} ended first, {how_it_ended(failure.exitcode)}; what it said is above", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:  # torchrun has ended the ranks and says so by a traceback
        print(f"megappo: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    return 0


def how_it_ended(exit_code: int) -> str:
    """exit_code: as a parent sees it (-9), or as a shell says it (137)."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    return f"killed by {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {exit_code}"


def _num_cores() -> int:
    """Those that this process may use: in a job of Slurm perhaps few of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _hand_on(received: int, frame: FrameType | None) -> None:
    """A request for a checkpoint that was sent to the command and not to its ranks."""
    import psutil

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if "TORCHELASTIC_RUN_ID" in child.environ():
                child.send_signal(received)
