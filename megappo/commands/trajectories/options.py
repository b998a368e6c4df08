"""Options of `megappo trajectories`. Imports nothing heavy: the parser is built for every command."""

from __future__ import annotations

import argparse

from megappo.commands.arguments import non_negative_int, positive_int

MAX_SAMPLES = 200
MAX_TOKENS = 400_000  # of a page whose number of samples was not given: 40 MB
WORST = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", metavar="RUN", help="directory of a run (output_dir/name), or a folder with its step_*.jsonl")
    add("--steps", metavar="A..B", help="these steps alone: 10, 10..20, 10.. or ..20 (default: all that were written)")
    add("--worst", type=non_negative_int, default=WORST, metavar="N", help=f"worst samples of each kind to list (default: {WORST})")
    add("--json", action="store_true", help="print all figures as JSON for scripts, those of every sample too")
    add("--html", metavar="OUT.html", help="write a page to look at in a browser: one file, no server and no network needed")
    add(
        "--max-samples",
        type=positive_int,
        metavar="N",
        help=f"samples on the page at most, the worst of each kind first (default: {MAX_SAMPLES}, of {MAX_TOKENS:,} tokens in all)",
    )
