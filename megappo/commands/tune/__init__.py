"""`megappo tune`: search for the fastest parallel layouts on given hardware, by a cost model and short trials."""

from __future__ import annotations

import argparse

from megappo.commands.parser import AddCommand, positive_int
from megappo.config.errors import ConfigError


def add_command(command: AddCommand) -> None:
    parser = command(
        "tune",
        main,
        "Rank the parallel layouts of a run on given GPUs by a model of its step time, and print the best as overrides.",
        "docs/layouts.md explains the tables.",
    )
    add = parser.add_argument
    add("--gpus", type=positive_int, metavar="N", help="ranks, one per GPU (default: run.num_ranks)")
    add(
        "--gpu",
        metavar="NAME",
        help="a100, h100, h200, h20, b200, gb200, cpu, or a YAML file with one (default: cpu with run.device=cpu)",
    )
    add("--gpus-per-node", type=positive_int, metavar="N", help="GPUs that share the fast link (default: the profile's)")
    add("--roles", metavar="A,B", help="roles whose layout is open (default: all, rollout among them); the others keep theirs")
    add("--placements", action="store_true", default=None, help="search the ranks of roles too: critic or rollout apart")
    add("--top", type=positive_int, default=10, metavar="N", help="rows of a table (default: 10)")
    add(
        "--mean-prompt-tokens",
        type=float,
        metavar="N",
        help="of a sequence on average (default: data.max_prompt_tokens; of examples whole: data.max_tokens)",
    )
    add("--mean-response-tokens", type=float, metavar="N", help="the same (default: rollout.max_response_tokens)")
    add(
        "--spread", type=float, metavar="S", help="of the logarithm of the lengths of responses (default: 0.85 with a mean, else 0)"
    )
    add("--lengths", metavar="RUN", help="lengths of responses from the trajectories of a run, in place of a mean")
    add("--as-is", action="store_true", help="price the configuration as it is written, part by part, and search nothing")
    add("--calibrate", metavar="RUN", help="with --as-is: hold the parts against the timings of a run of this configuration")
    add("--measure", type=positive_int, metavar="K", help="run short trials of the best K and rank them by what was measured")
    add("--slurm", action="store_true", help="run the trials on the nodes of this job of Slurm (salloc, sbatch), not here")
    add(
        "--output",
        metavar="FILE",
        help="write the winner: a whole configuration (.yaml), or its key=value lines; with --calibrate a profile for --gpu",
    )
    add("--json", metavar="FILE", help="write the ranking")


def main(args: argparse.Namespace) -> int:
    if args.slurm and args.measure is None:
        raise ConfigError("--slurm runs the trials of --measure K on the nodes of a job, and has no effect without it")
    from megappo.config.loading import load_run
    from megappo.trainer.prepare.hub import with_local_models

    config = with_local_models(load_run(args.config, args.overrides), shapes_only=True)
    from megappo.trainer.prepare.layouts import read_archs  # late: imports numpy, and a wrong key should fail at once

    read_archs(config)
    from megappo.commands.tune.run import tune

    return tune(args, config)
