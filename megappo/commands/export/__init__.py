"""`megappo export`: write a run's checkpoint as a Hugging Face checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from megappo.commands.parser import AddCommand, step_or_best


def add_command(command: AddCommand) -> None:
    export = command("export", main, "Write a run's checkpoint as a Hugging Face checkpoint.", config=None)
    export.add_argument("run_dir", metavar="RUN_DIR", help="directory of a run (output_dir/name)")
    export.add_argument("output", metavar="OUTPUT", help="directory to write")
    export.add_argument(
        "--step", type=step_or_best, metavar="N", help="step of the checkpoint, or best, by trainer.keep_best (default: the last)"
    )
    export.add_argument(
        "--role",
        metavar="ROLE",
        default="policy",
        help="trained role: policy (default) or critic; or ema, the average of the policy (policy.ema)",
    )


def main(args: argparse.Namespace) -> int:
    from megappo.commands.export.inputs import check_export

    check_export(Path(args.run_dir), Path(args.output), args.role, args.step)  # before the next import, which brings torch
    from megappo.commands.export.export import export_checkpoint

    step = export_checkpoint(args.run_dir, args.output, role=args.role, step=args.step)
    print(f"{args.role} of step {step} -> {args.output}")
    return 0
