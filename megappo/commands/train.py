"""`megappo train`: the same call starts the ranks and is a rank."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megappo.commands.launch import add_max_restarts
from megappo.commands.parser import AddCommand, Parser
from megappo.telemetry.console import keep_console

if TYPE_CHECKING:
    from megappo.config.schema import TrainConfig


def add_command(command: AddCommand) -> None:
    add_restarting(command("train", main, "Train with PPO. Starts the ranks itself unless torchrun or srun has."))


def add_restarting(parser: Parser) -> None:
    parser.add_argument("--resume", action="store_true", help="continue the run of this name after its last checkpoint")
    add_max_restarts(parser)


def main(args: argparse.Namespace) -> int:
    """Be a rank of a world that was started, or check everything here and start one."""
    from megappo.config.loading import load_config
    from megappo.runtime.world import is_rank, join_srun
    from megappo.trainer.prepare.hub import local_overrides, with_local_models

    keep_console()
    join_srun()
    if is_rank():
        from megappo.commands.rank import train_rank

        return train_rank(args)
    written = load_config(args.config, args.overrides)
    config = with_local_models(written)
    return _start_ranks(args, config, [*args.overrides, *local_overrides(written, config)])


def _start_ranks(args: argparse.Namespace, config: TrainConfig, overrides: list[str]) -> int:
    """Check everything once, start the ranks and wait. overrides: the user's, and directories for models of the hub."""
    from megappo.trainer.prepare.inputs import check_inputs

    # Checked here, a mistake is one line and not a traceback of the launcher.
    check_inputs(config, resume=args.resume)
    from megappo.commands.launch.attempt import check_start
    from megappo.commands.launch.training import train_here
    from megappo.commands.plan.run import plan_here
    from megappo.commands.prepared import require_device
    from megappo.runtime.lease import held_lease
    from megappo.runtime.permissions import apply_permissions
    from megappo.runtime.world import world_size
    from megappo.trainer.preflight import require_isolation_here, require_servers_here, require_storage
    from megappo.trainer.prepare.remote_run import fetch, find_copies

    if args.max_restarts:
        from megappo.commands.launch.submit import require_resumable

        require_resumable(config, "a restart", "--max-restarts 0")
    copies = find_copies(config, resume=args.resume)
    run_dir = check_start(config.run, resume=args.resume and copies is None)
    require_device(config.run.device)
    require_isolation_here(config)
    ranks = world_size(config.run)
    planned = plan_here(config, ranks, None, resume=args.resume)
    assert planned.data is not None, "only a plan of shapes has no data"
    require_servers_here(planned.data, resume=args.resume)
    require_storage(config)
    if copies is not None:
        fetch(copies, run_dir)
    apply_permissions(config.run.permissions)
    folder, command = None, ["train", args.config, *overrides]
    if args.max_restarts:
        from megappo.commands.launch.submit import record

        folder = record(config, run_dir)  # before the lease, which it refuses
        # Every restart reads the recorded configuration: later edits of the file do not reach it.
        command = ["train", str(folder / "config.yaml")]
    with held_lease(run_dir, f"megappo train {args.config}"):
        print(planned.report(), flush=True)
        return train_here(ranks, command, run_dir, resume=args.resume, max_restarts=args.max_restarts, record=folder)
