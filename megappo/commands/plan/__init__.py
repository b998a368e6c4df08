"""`megappo plan`: layouts, memory, batch arithmetic and data of a run, computed before anything heavy starts."""

from __future__ import annotations

import argparse

from megappo.commands.parser import AddCommand, positive_float, positive_int


def add_command(command: AddCommand) -> None:
    plan = command("plan", main, "Print ranks, memory, batch arithmetic and steps of a run, and refuse what cannot work.")
    plan.add_argument(
        "--world-size", type=positive_int, metavar="N", help="ranks to plan for (default: run.num_ranks, or one per GPU)"
    )
    plan.add_argument("--gpu-memory-gib", type=positive_float, metavar="GIB", help="plan for GPUs of this size, on any machine")
    plan.add_argument(
        "--gpu",
        metavar="NAME",
        help="plan for a profile of `megappo tune`, and price a step whose responses, or examples, are as long as allowed",
    )
    plan.add_argument(
        "--shapes-only",
        action="store_true",
        help="read config.json of the models alone: weights, tokenizer and data may be missing",
    )
    plan.add_argument("--plot", metavar="FILE", help="draw rank grids and pipelines (.png, .svg or .pdf)")
    plan.add_argument("--resume", action="store_true", help="plan to continue a run: inputs that only its start reads may be gone")


def main(args: argparse.Namespace) -> int:
    from megappo.config.loading import load_run
    from megappo.runtime.world import world_size
    from megappo.trainer.prepare.hub import with_local_models

    config = with_local_models(load_run(args.config, args.overrides), shapes_only=args.shapes_only)
    from megappo.trainer.prepare.checks import check_inputs  # late: imports numpy, and a wrong key should fail at once

    check_inputs(config, resume=args.resume, shapes_only=args.shapes_only)
    from megappo.commands.plan.plot import PICTURES, plot
    from megappo.commands.plan.run import plan_here
    from megappo.commands.plan.supervised import unpassed_roles
    from megappo.commands.tune.written import lines_of_plan
    from megappo.config.output_file import check_output_file
    from megappo.telemetry.hardware import load_hardware

    target = None if args.plot is None else check_output_file("--plot", args.plot, PICTURES)
    ranks = args.world_size if args.world_size is not None else world_size(config.run)
    hardware = None if args.gpu is None else load_hardware(args.gpu)
    gib, device = args.gpu_memory_gib, None
    if hardware is not None:
        gib, device = (gib or hardware.memory_gib, None) if hardware.is_gpu() else (None, "cpu")
    planned = plan_here(config, ranks, gib, resume=args.resume, shapes_only=args.shapes_only, device=device)
    print(planned.report(), end="")
    if hardware is not None:
        print("\n  ".join(["\nstep", *lines_of_plan(planned.plan, hardware, unpassed_roles(config))]))
    if planned.plan.device == "cpu" and config.run.device == "auto":
        print("\nplanned for CPUs: run.device is auto and this machine has no GPU; --gpu-memory-gib plans for GPUs")
    if target is not None:
        plot(planned.plan, target)
        print(f"\npicture: {target}")
    return 0
