"""Commands that judge a run before it starts: `megappo plan`, `launch`, `tune`, `verify`."""

from __future__ import annotations

import argparse

from megappo.commands.arguments import positive_float, positive_int
from megappo.commands.launch.options import add_options as add_launch_options
from megappo.commands.parser import AddCommand
from megappo.commands.prepared import device_of, plan_here, require_device
from megappo.commands.tune.options import add_options as add_tune_options
from megappo.config.errors import ConfigError


def add_commands(command: AddCommand) -> None:
    plan = command("plan", cmd_plan, "Print ranks, memory, batch arithmetic and steps of a run, and refuse what cannot work.")
    plan.add_argument(
        "--world-size", type=positive_int, metavar="N", help="ranks to plan for (default: run.num_ranks, or one per GPU)"
    )
    plan.add_argument("--gpu-memory-gib", type=positive_float, metavar="GIB", help="plan for GPUs of this size, on any machine")
    plan.add_argument(
        "--shapes-only",
        action="store_true",
        help="read config.json of the models alone: weights, tokenizer and data may be missing",
    )
    plan.add_argument("--plot", metavar="FILE", help="draw rank grids and pipelines (.png, .svg or .pdf)")
    plan.add_argument("--resume", action="store_true", help="plan to continue a run: inputs that only its start reads may be gone")
    add_launch_options(
        command(
            "launch",
            cmd_launch,
            "Check a run here, write its job script, and submit it to Slurm.",
            "One rank per GPU. The script, the resolved configuration and the launch's environment are kept in the run directory.",
        )
    )
    add_tune_options(
        command(
            "tune",
            cmd_tune,
            "Rank the parallel layouts of a run on given GPUs by a model of its step time, and print the best as overrides.",
            "docs/tuning.md explains the tables. Without CONFIG, --probe measures this machine and prints its profile.",
            config="[CONFIG]",
        )
    )
    verify = command(
        "verify",
        cmd_verify,
        "Measure a small version of a run in its layout and on one rank, and print where the numbers differ.",
        "The version has the run's families, layouts and algorithm and tiny random models. Printed is the largest difference of "
        "everything that must not depend on the layout: log-probs, values, advantages, losses, gradients, parameters after three "
        "steps. Reads config.json of the models, no weights and no data. Exit code: 0 if all numbers agree, 1 if some differ, "
        "2 for a configuration that cannot work.",
    )
    verify.add_argument(
        "--max-ranks",
        type=positive_int,
        default=8,
        metavar="N",
        help="most ranks to start (default: 8, and never more than there are GPUs; run.device=cpu needs none); larger layouts "
        "are halved, with a note",
    )
    verify.add_argument(
        "--tolerance",
        type=positive_float,
        default=1e-5,
        metavar="X",
        help="largest relative difference (default: 1e-5; ten times this for the parameters after the steps)",
    )
    verify.add_argument("--bisect", action="store_true", help="also measure every axis and setting alone, to find the culprit")


def cmd_plan(args: argparse.Namespace) -> int:
    from megappo.config.loading import load_config
    from megappo.runtime.world import world_size
    from megappo.trainer.prepare.hub import with_local_models
    from megappo.trainer.prepare.inputs import check_inputs

    config = with_local_models(load_config(args.config, args.overrides), shapes_only=args.shapes_only)
    check_inputs(config, resume=args.resume, shapes_only=args.shapes_only)
    from megappo.commands.plan.counted import counter_of_built_models
    from megappo.commands.plan.plot import plot
    from megappo.telemetry.picture import check_plot

    target = None if args.plot is None else check_plot(args.plot)
    ranks = args.world_size if args.world_size is not None else world_size(config.run)
    planned = plan_here(
        config, ranks, args.gpu_memory_gib, resume=args.resume, shapes_only=args.shapes_only, counter=counter_of_built_models()
    )
    print(planned.report(), end="")
    if planned.plan.device == "cpu" and config.run.device == "auto":
        print("\nplanned for CPUs: run.device is auto and this machine has no GPU; --gpu-memory-gib plans for GPUs")
    if target is not None:
        plot(planned.plan, target)
        print(f"\npicture: {target}")
    return 0


def cmd_launch(args: argparse.Namespace) -> int:
    from megappo.commands.launch.command import launch, launch_here

    return launch_here(args, plan_here) if args.local else launch(args, plan_here)


def cmd_tune(args: argparse.Namespace) -> int:
    from megappo.commands.tune.options import check_options

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


def cmd_verify(args: argparse.Namespace) -> int:
    from megappo.config.loading import load_config
    from megappo.runtime.world import is_rank
    from megappo.trainer.prepare.hub import with_local_models
    from megappo.trainer.prepare.layouts import read_archs

    if is_rank():
        raise ConfigError("verify starts its own ranks; run it once, without torchrun (RANK and WORLD_SIZE are set here)")
    config = with_local_models(load_config(args.config, args.overrides), shapes_only=True)
    read_archs(config, need_weights=False)
    from megappo.commands.verify.run import verify

    require_device(config.run.device)
    device = device_of(config.run.device)
    return verify(config, device, max_ranks=args.max_ranks, tolerance=args.tolerance, bisect=args.bisect)
