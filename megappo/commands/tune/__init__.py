"""`megappo tune`: search for the fastest parallel layouts on given hardware, by a cost model and short trials."""

from __future__ import annotations

import argparse

from megappo.commands.parser import AddCommand, positive_int
from megappo.config.errors import ConfigError

OF_THE_JOB = ("partition", "account", "time", "sbatch")
"""Options that have no effect without --slurm."""
OF_A_RANKING = (
    "gpus",
    "gpus_per_node",
    "roles",
    "mean_prompt_tokens",
    "mean_response_tokens",
    "measure",
    "output",
    "json",
    "placements",
)
"""Options that have no effect if the machine is only probed."""


def add_command(command: AddCommand) -> None:
    parser = command(
        "tune",
        main,
        "Rank the parallel layouts of a run on given GPUs by a model of its step time, and print the best as overrides.",
        "docs/layouts.md explains the tables. Without CONFIG, --probe measures this machine and prints its profile.",
        config="[CONFIG]",
    )
    add = parser.add_argument
    add("--gpus", type=positive_int, metavar="N", help="ranks, one per GPU (default: run.num_ranks)")
    add("--gpu", metavar="NAME", help="a100, h100, h200, b200, cpu, or a YAML file with one (default: cpu with run.device=cpu)")
    add("--gpus-per-node", type=positive_int, metavar="N", help="GPUs that share the fast link (default: the profile's)")
    add("--roles", metavar="A,B", help="roles whose layout is open (default: all, rollout among them); the others keep theirs")
    add("--placements", action="store_true", default=None, help="search the ranks of roles too: critic or rollout apart")
    add("--top", type=positive_int, default=10, metavar="N", help="rows of a table (default: 10)")
    add("--mean-prompt-tokens", type=float, metavar="N", help="of a sequence on average (default: data.max_prompt_tokens)")
    add("--mean-response-tokens", type=float, metavar="N", help="the same (default: rollout.max_response_tokens)")
    add("--measure", type=positive_int, metavar="K", help="run short trials of the best K and rank them by what was measured")
    add("--probe", action="store_true", help="measure this machine and rank by that instead of a profile; alone without CONFIG")
    add("--output", metavar="FILE", help="write the winner: a whole configuration (.yaml), or its key=value lines")
    add("--json", metavar="FILE", help="write the ranking")
    add = parser.add_argument_group("trials as a job").add_argument
    add("--slurm", action="store_true", help="run the trials of --measure as a job of Slurm instead of here")
    add("--partition", metavar="NAME", help="Slurm's partition")
    add("--account", metavar="NAME", help="Slurm's account")
    add("--time", metavar="TIME", help="longest time of the job, for example 30:00")
    add("--sbatch", action="append", metavar="OPTION", help="another option of sbatch, e.g. --sbatch=--exclusive")


def main(args: argparse.Namespace) -> int:
    check_options(args)
    config = None
    if args.config is not None:
        from megappo.config.loading import load_config
        from megappo.trainer.prepare.hub import with_local_models
        from megappo.trainer.prepare.layouts import read_archs

        config = with_local_models(load_config(args.config, args.overrides), shapes_only=True)
        read_archs(config, need_weights=False)
    from megappo.commands.tune.run import tune

    return tune(args, config)


def check_options(args: argparse.Namespace) -> None:
    """Raise ConfigError for options without effect in this combination, before anything heavy is imported."""
    if args.slurm and args.measure is None:
        raise ConfigError("--slurm runs the trials of --measure K as a job, and has no effect without it")
    for name in OF_THE_JOB:
        if getattr(args, name) is not None and not args.slurm:
            raise ConfigError(f"--{name} is of the job of --slurm, and has no effect without it")
    if args.probe and args.gpu is not None:
        raise ConfigError(f"--gpu {args.gpu}: --probe measures this machine instead; leave one of the two out")
    if args.config is not None:
        return
    if not args.probe:
        raise ConfigError("CONFIG is missing: a YAML file, see docs/config.md")
    for name in OF_A_RANKING:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect: --probe without CONFIG only measures this machine")
