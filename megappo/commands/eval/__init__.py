"""`megappo eval`: run a configuration's evaluations with the weights of a checkpoint, in any layout, without training."""

from __future__ import annotations

import argparse
import os

from megappo.commands.parser import AddCommand
from megappo.commands.prepared import device_of, enter_rank, leave_world, local_models, require_device
from megappo.runtime.ending import DONE


def add_command(command: AddCommand) -> None:
    evaluate = command(
        "eval",
        main,
        "Evaluate a checkpoint on data.eval and the sets of `evaluations`, without a training.",
        "CHECKPOINT is a run (its newest checkpoint), one checkpoint of it (RUN/checkpoints/step-N), or a Hugging Face checkpoint. "
        "The layout is that of the policy in CONFIG and may differ from the run's. docs/evaluation.md explains the figures.",
        config=None,
    )
    evaluate.set_defaults(takes_overrides=True)
    evaluate.add_argument("checkpoint", metavar="CHECKPOINT", help="directory of a run, of one of its checkpoints, or of a model")
    evaluate.add_argument("config", metavar="CONFIG", help="YAML file, see docs/config.md")
    evaluate.add_argument("overrides", metavar="key=value", nargs="*", help="keys set over the file")
    evaluate.add_argument("--only", action="append", default=[], metavar="SET", help="evaluate this set alone (may be repeated)")
    evaluate.add_argument("-o", "--output", metavar="FILE", help="write settings and results as JSON")


def main(args: argparse.Namespace) -> int:
    from megappo.commands.launch.local import start_ranks
    from megappo.config.loading import load_config
    from megappo.runtime.world import is_rank, join_srun, world_size
    from megappo.trainer.prepare.hub import local_overrides

    join_srun()
    if is_rank():
        enter_rank()
    written = load_config(args.config, args.overrides)
    config = local_models(written)
    from megappo.config.output_file import check_output_file
    from megappo.trainer.prepare.evaluate import find_evaluation, plan_evaluation

    output = None if args.output is None else check_output_file("--output", args.output)
    find_evaluation(config, args.checkpoint, args.only)  # before the next call imports torch
    ranks = world_size(config.run)
    require_device(config.run.device)
    planned = plan_evaluation(config, args.checkpoint, args.only, ranks, device_of(config.run.device))
    if not is_rank():
        from megappo.trainer.preflight import require_isolation_here, require_servers_here

        require_isolation_here(planned.config)
        require_servers_here(planned.data, resume=False)
        # A live run may save another checkpoint meanwhile: all ranks take this one.
        options = ["--only=" + name for name in args.only] + ([f"--output={args.output}"] if args.output else [])
        overrides = [*args.overrides, *local_overrides(written, config)]
        return start_ranks(ranks, ["eval", str(planned.source.path), args.config, *overrides, *options])
    from megappo.commands.eval.evaluate import evaluate_checkpoint, report

    results = evaluate_checkpoint(planned)
    leave_world()
    if os.environ["RANK"] == "0":
        report(planned, results, output)
    return DONE
