"""`megappo train`: the same call starts the ranks and is a rank."""

from __future__ import annotations

import argparse
from pathlib import Path

from megappo.commands.launch import add_max_restarts
from megappo.commands.parser import AddCommand, Parser
from megappo.config.errors import ConfigError
from megappo.telemetry.console import keep_console


def add_command(command: AddCommand) -> None:
    parser = command("train", main, "Train with PPO. Starts the ranks itself unless torchrun or srun has.")
    add_restarting(parser)
    parser.add_argument(
        "--replay",
        metavar="RUN",
        help="directory of an asynchronous run of the same configuration (rollout.max_staleness): begin requests and push weights "
        "at the engine steps of its events, so that every number of it comes again",
    )


def add_restarting(parser: Parser) -> None:
    parser.add_argument("--resume", action="store_true", help="continue the run of this name after its last checkpoint")
    add_max_restarts(parser)


def main(args: argparse.Namespace, kind: str | None = None) -> int:
    """Be a rank of a world that was started, or check everything here and start one. kind: of a file that names none."""
    from megappo.config.loading import load_config, load_run
    from megappo.runtime.world import is_rank, join_srun
    from megappo.trainer.prepare.hub import local_overrides, with_local_models

    keep_console()
    join_srun()
    if args.replay is not None:
        fault = "use it without --max-restarts; a replay that fails would fail again" if args.max_restarts else None
        if load_config(args.config, args.overrides).rollout.max_staleness is None:
            fault = "rollout.max_staleness is null, and such a run repeats by itself; leave it out"
        if fault is not None:
            raise ConfigError(f"--replay {args.replay}: {fault}")
    if is_rank():
        from megappo.commands.rank import train_rank

        return train_rank(args, kind)
    written = load_run(args.config, args.overrides, kind)
    config = with_local_models(written)
    from megappo.commands.launch.training import start_here

    name = "train" if kind is None else args.command
    command = [name, args.config, *args.overrides, *local_overrides(written, config)]
    command += [] if args.replay is None else ["--replay", args.replay]
    replay = None if args.replay is None else Path(args.replay)
    holder = f"megappo {name} {args.config}"
    return start_here(args, config, holder, command=None if args.max_restarts else command, replay=replay)
