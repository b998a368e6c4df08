"""Starts the ranks of a command on this machine, when no launcher (torchrun, or whatever sets RANK and WORLD_SIZE) has."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Sequence

from megappo.config.schema import RunConfig


def is_rank() -> bool:
    """True in a process that a launcher started as one rank of a world."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size(run: RunConfig) -> int:
    """Ranks that the run will have: the launcher's world, or `run.num_ranks`, or one per GPU, or 1.

    ValueError where the launcher's world and `run.num_ranks` differ, and in one of several srun tasks that nothing made ranks of.
    """
    if not is_rank() and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        raise ValueError("srun started several tasks without RANK and WORLD_SIZE: start one task per node that runs torchrun")
    if is_rank():
        started = int(os.environ["WORLD_SIZE"])
        if run.num_ranks not in (None, started):
            raise ValueError(f"run.num_ranks = {run.num_ranks}: the launcher started {started} ranks; set run.num_ranks={started} or null")
        return started
    if run.num_ranks is not None:
        return run.num_ranks
    if run.device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def start_ranks(num_ranks: int, arguments: Sequence[str], module: str = "megappo.cli") -> int:
    """Run `megappo ARGUMENTS` (or another module) on `num_ranks` ranks by torchrun, which chooses a free port.

    Returns the exit code. ValueError where the machine has GPUs, but fewer than ranks.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from megappo.platform.device import check_gpus

    check_gpus(num_ranks)
    # torchrun would set 1 thread and warn about it; each rank gets its share of the cores instead.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    # Its own records of a failing rank say less than the rank's traceback.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(["--standalone", "--nproc-per-node", str(num_ranks), "-m", module, *arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"megappo: rank {rank} ended first, {_how_it_ended(failure.exitcode)}; what it said is above", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as error:  # torchrun has ended the ranks and says so by a traceback
        print(f"megappo: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    return 0


def _how_it_ended(exit_code: int) -> str:
    return f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
