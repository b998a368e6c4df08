"""Stands for `megappo train` where a test is about the launch alone: joins the world as it does, then behaves as STUB says."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from megappo.commands.launch.node import SHUTDOWN_S
from megappo.runtime.ending import Ended, record_end
from megappo.runtime.failure import ATTEMPT_DIR, KILL_GRACE_S, SPARE_RANKS, record_exceptions
from megappo.runtime.world import join_srun

WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def save(step: int) -> Path:
    """A checkpoint, as far as the launch looks at it; the run's directory."""
    # Not in the other ranks, of which there are two dozen: half a second of processor time each.
    from megappo.checkpoint.manifest import Manifest, write_manifest
    from megappo.config.loading import load_config
    from megappo.config.run_directory import run_dir_of

    run_dir = run_dir_of(load_config(sys.argv[-1]).run)
    folder = run_dir / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    write_manifest(folder, Manifest(step, 4, False, {}, {}))
    return run_dir


if __name__ == "__main__":
    join_srun()
    rank = int(os.environ["RANK"])
    record_exceptions(rank)
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    print(
        json.dumps({"arguments": sys.argv[1:], **{name: os.environ[name] for name in WORLD}, "SITE": os.environ.get("SITE")}),
        flush=True,
    )
    if os.environ["STUB"] == "rank 1 raises":
        if rank == 1:
            time.sleep(0.5)  # the others are asleep by then, as they would be in a collective
            raise RuntimeError("the culprit")
        for _ in range(6000):
            Path(os.environ[ATTEMPT_DIR], f"rank-{rank}.lives").touch()
            time.sleep(0.1)
    if os.environ["STUB"] == "rank 1 fails after a checkpoint" and rank == 0:
        save(1 + int(os.environ.get("SLURM_RESTART_COUNT", "0")))
        time.sleep(600)
    if os.environ["STUB"] == "rank 1 fails after a checkpoint" and rank == 1:
        time.sleep(2)
        sys.exit(3)
    if os.environ["STUB"] == "rank 2 is killed":
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        raise ConnectionError("a victim: connection closed by peer")
    if os.environ["STUB"] == "a spare rank is killed":
        folder = Path(os.environ[ATTEMPT_DIR])
        if rank == 0:
            (folder / SPARE_RANKS).write_text("2 3")
        while rank == 2 and not (folder / SPARE_RANKS).exists():
            time.sleep(0.1)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while not (folder / "rank-2.lost").exists():
            time.sleep(0.1)
        time.sleep(KILL_GRACE_S + 2)  # longer than after a failure
        if rank == 0:
            (folder / SPARE_RANKS).unlink()
    if os.environ["STUB"] == "all are asked to stop":
        if rank == 0:
            while sum(log.stat().st_size > 0 for log in Path(os.environ[ATTEMPT_DIR]).glob("rank-*.log")) < 4:
                time.sleep(0.1)
            # scancel is in the step too, and would end itself.
            subprocess.run(["bash", "-c", 'trap "" TERM; exec scancel --signal=TERM "$SLURM_JOB_ID"'], check=True)
        assert asked.wait(600)
        time.sleep(SHUTDOWN_S + 2)  # the rest of the step: longer than torchrun waits for what it has told to end
        if rank == 0:
            record_end(save(1), Ended("stopped", 1))
