"""Starts the ranks of a command on this machine, when nothing (torchrun, srun) has started them yet."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Sequence

from megappo.config.schema import RunConfig


def is_rank() -> bool:
    """True in a process that a launcher started as one rank of a world."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size(run: RunConfig) -> int:
    """Ranks that the run will have: the launcher's world, or `run.num_ranks`, or one per GPU, or 1.

    ValueError where the launcher's world and `run.num_ranks` differ.
    """
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


def start_ranks(num_ranks: int, arguments: Sequence[str]) -> int:
    """Run `megappo ARGUMENTS` on `num_ranks` ranks by torchrun; returns the exit code. A free port is chosen by torchrun itself."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
        "-m", "megappo.cli", *arguments,
    ]  # fmt: skip
    environment = dict(os.environ)
    # torchrun would set 1 and print a warning about it; each rank gets its share of the cores instead.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    return subprocess.run(command, env=environment, check=False).returncode
