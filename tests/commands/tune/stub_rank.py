"""A stand-in for `megappo.commands.tune.rank`, which it is started like: does what a trial's name says, and imports no torch."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from megappo.commands.tune.trials import RUNNING, Measured, read_outcome, world_folder, write_outcome
from megappo.runtime.failure import ATTEMPT_DIR, record_exceptions
from megappo.runtime.world import join_srun


def main(folder: Path, names: list[str]) -> None:
    join_srun()
    rank, world = int(os.environ["RANK"]), world_folder(folder, names)
    os.environ[ATTEMPT_DIR] = str(world)
    record_exceptions(rank)
    if rank == 0:
        with (folder / "starts").open("a") as starts:
            starts.write(" ".join(names) + "\n")
    for name in names:
        if "nowhere" in name:
            if rank == 0:
                raise RuntimeError("before any trial")
            time.sleep(600)
        if rank == 0:
            (world / RUNNING).write_text(name)
        else:
            _wait_for(name, world, folder)
        if "fails" in name:
            if rank == 1:
                raise MemoryError("of this\nrank")
            time.sleep(600)
        if "killed" in name:
            if rank == 1:
                os.kill(os.getpid(), 9)
            time.sleep(600)
        if "preempted" in name:
            os.kill(os.getpid(), 15)
        if rank == 0:
            write_outcome(folder, name, Measured(forward_s=1.0, update_s=2.0))
            (world / RUNNING).unlink()


def _wait_for(name: str, world: Path, folder: Path) -> None:
    """In place of a barrier: until the trial has begun, or is over."""
    while read_outcome(folder, name) is None:
        with contextlib.suppress(FileNotFoundError):
            if (world / RUNNING).read_text() == name:
                return
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
