"""Stands for `megappo train` where a test is about the launch alone: joins the world as it does, then behaves as STUB says."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from megappo.checkpoint.manifest import Manifest, write_manifest
from megappo.config.checks import run_dir_of
from megappo.config.loading import load_config
from megappo.launch.failure import record_exceptions
from megappo.launch.world import join_srun

WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

if __name__ == "__main__":
    join_srun()
    rank = int(os.environ["RANK"])
    record_exceptions(rank)
    print(json.dumps({"arguments": sys.argv[1:], **{name: os.environ[name] for name in WORLD}}), flush=True)
    if os.environ["STUB"] == "rank 1 raises":
        if rank == 1:
            time.sleep(0.5)  # the others are asleep by then, as they would be in a collective
            raise RuntimeError("the culprit")
        time.sleep(600)
    if os.environ["STUB"] == "rank 1 fails after a checkpoint" and rank == 0:
        step = 1 + int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        folder = run_dir_of(load_config(sys.argv[-1]).run) / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        write_manifest(folder, Manifest(step, 4, False, {}, {}))
        time.sleep(600)
    if os.environ["STUB"] == "rank 1 fails after a checkpoint" and rank == 1:
        time.sleep(2)
        sys.exit(3)
    if os.environ["STUB"] == "rank 2 is killed":
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        raise ConnectionError("a victim: connection closed by peer")
