"""Start the ranks of a command on this machine or on this node, by torchrun in this process."""

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
# Seconds from the first failure to the kill of the other ranks: they may wait for the dead one for ever.
SHUTDOWN_S = 5


def start_ranks(num_ranks: int, arguments: Sequence[str], module: str = "megappo.cli") -> int:
    """Run `megappo ARGUMENTS` (or another module) on `num_ranks` ranks by torchrun, which chooses a free port.

    Returns the exit code. ValueError if the machine has GPUs, but fewer than ranks.
    """
    from megappo.platform.device import check_gpus

    check_gpus(num_ranks)
    # torchrun would set 1 thread and warn about it; each rank gets its share of the cores instead.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // num_ranks)))
    handler = signal.signal(signal.SIGUSR1, _forward_signal)
    try:
        return run_torchrun(["--standalone", "--nproc-per-node", str(num_ranks), "-m", module, *arguments])
    finally:
        signal.signal(signal.SIGUSR1, handler)


def command_exit_code(code: int, run_dir: Path) -> int:
    """Exit code of a command whose ranks ended with `code`: EXIT_STOPPED after a stop, where the ranks end with 0."""
    return EXIT_STOPPED if code == 0 and (run_dir / STOPPED).exists() else code


def run_torchrun(arguments: Sequence[str]) -> int:
    """Run torchrun's command line. Returns the exit code of the rank that failed first on this node, or 0."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # torchrun's own report of a failing rank says less than the rank's traceback.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(list(arguments)))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"megappo: rank {rank} ended first, {describe_exit(failure.exitcode)}; what it said is above", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:  # torchrun has ended the ranks; its traceback would add nothing
        print(f"megappo: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    return 0


def describe_exit(exit_code: int) -> str:
    """Put an exit code into words. exit_code: of a subprocess (-9) or of a shell (137)."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    return f"killed by {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {exit_code}"


def _num_cores() -> int:
    """Cores that this process may use."""
    # The affinity: Slurm may give the job a few of the machine's cores.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _forward_signal(received: int, frame: FrameType | None) -> None:
    """Forward a request for a checkpoint, sent to this command, to its ranks."""
    import psutil

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if "TORCHELASTIC_RUN_ID" in child.environ():  # a rank, and not another helper process
                child.send_signal(received)
