"""`megappo compare`: the curves of several runs side by side, and the differences of their settings."""

from __future__ import annotations

import argparse

from megappo.commands.parser import AddCommand, limit, positive_float, positive_int


def add_command(command: AddCommand) -> None:
    compare = command(
        "compare",
        main,
        "Lay the curves of two or more runs over each other: values, largest differences, and where they part.",
        "Also prints the settings, versions and data that differ. Reads the runs' files alone, also beside a live run. Exit code: "
        "1 if a --max-difference is exceeded, else 0. docs/evaluation.md explains the table.",
        config=None,
    )
    add = compare.add_argument
    add("runs", metavar="RUN", nargs="+", help="directories of two or more runs (output_dir/name)")
    add("--metric", action="append", default=[], metavar="NAME", help="compare this one, or all of critic/* (may be repeated)")
    add("--window", type=positive_int, default=1, metavar="N", help="compare means of the last N values instead of single ones")
    add("--until", type=positive_int, metavar="STEP", help="leave out what was logged after this step")
    add(
        "--tolerance",
        type=positive_float,
        default=1e-4,
        metavar="T",
        help="relative to a metric's largest value, for `apart` (1e-4)",
    )
    add(
        "--max-difference",
        type=limit,
        action="append",
        default=[],
        metavar="METRIC=VALUE",
        help="exit with 1 if the runs differ by more at any step, or if one of them has not logged a step (may be repeated)",
    )
    add("--plot", metavar="FILE", help="draw the curves (.png, .svg or .pdf)")
    add("--json", action="store_true", help="print JSON for scripts: every value, difference and setting")


def main(args: argparse.Namespace) -> int:
    from megappo.commands.compare.compare import compare_runs

    return compare_runs(args)
