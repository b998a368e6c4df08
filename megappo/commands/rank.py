"""A rank of a run, started by `megappo` itself, torchrun or srun: loads the data and trains. It imports
no plan, which a test checks. The process that starts the ranks, or `megappo plan`, checks once that the run fits."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from megappo.commands.prepared import device_of, enter_rank, leave_world, local_models
from megappo.config.errors import ConfigError
from megappo.runtime.ending import DONE
from megappo.runtime.life import LAUNCHER_LISTENS


def train_rank(args: argparse.Namespace, kind: str | None) -> int:
    """Be a rank. kind: of a file that names none."""
    from megappo.config.loading import load_run
    from megappo.runtime.ending import StopRequest
    from megappo.runtime.world import world_size

    stop = StopRequest()
    enter_rank(stop)
    if args.max_restarts:
        raise ConfigError(
            f"--max-restarts {args.max_restarts}: these ranks were started by torchrun or srun; only `megappo train` or "
            "`megappo launch --local` itself can restart them (under Slurm: --max-requeues)"
        )
    config = local_models(load_run(args.config, args.overrides, kind))
    from megappo.trainer.prepare.run import prepare_run

    ranks = world_size(config.run)
    prepared = prepare_run(config, ranks, device_of(config.run.device), resume=args.resume)
    _tell(f"{ranks} ranks; `megappo plan {args.config}` prints their layouts, memory and batches", prepared.notes)
    from megappo.runtime.libraries import freeze_imports, keep_freed_memory
    from megappo.trainer.main import train

    keep_freed_memory()
    freeze_imports()
    replay = None if args.replay is None else Path(args.replay)
    train(config, prepared.data, resume=args.resume, stop=stop, replay=replay)
    leave_world()
    # After a stop too: with another code, torchrun or srun would treat the first rank to exit as failed and kill the others.
    return DONE


def _tell(line: str, notes: Sequence[str]) -> None:
    """Print on rank 0 under torchrun or srun what `megappo train`'s own launcher prints for its ranks."""
    if os.environ["RANK"] == "0" and LAUNCHER_LISTENS not in os.environ:
        print("\n".join([line, *(f"note: {note}" for note in notes)]), flush=True)
