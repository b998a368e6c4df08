"""`megappo gate`: check the metrics of a run against limits."""

from __future__ import annotations

import argparse
from pathlib import Path

from megappo.commands.parser import AddCommand


def add_command(command: AddCommand) -> None:
    gate = command(
        "gate",
        main,
        "Hold the metrics of a run against limits.",
        "GATES is a YAML list of lines such as `eval/score > 0.65 at 40`, `kl/per_token < 0.1 max over 1..40` and "
        "`reward/score_mean >= 0.7 mean over last 10`. Exit code: 0 if all pass, 1 if one fails.",
        config=None,
    )
    gate.add_argument("run_dir", metavar="RUN", help="directory of a run (output_dir/name)")
    gate.add_argument("gates", metavar="GATES", help="YAML file, see docs/evaluation.md")


def main(args: argparse.Namespace) -> int:
    from megappo.commands.gate.gates import show_gates

    return show_gates(Path(args.run_dir), Path(args.gates))
