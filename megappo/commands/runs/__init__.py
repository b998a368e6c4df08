"""`megappo runs`: list the runs below a directory. `megappo runs verify`: read every byte of a run's checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path

from megappo.commands.parser import AddCommand, positive_int
from megappo.config.errors import ConfigError


def add_command(command: AddCommand) -> None:
    runs = command(
        "runs",
        main,
        "List the runs below a directory: state, last step, last checkpoint, size on disk, and why a run ended.",
        "`megappo runs verify RUN` reads every byte of a run's checkpoints and compares it with the manifests. Neither changes a "
        "file, and both work beside a live run. Exit code of verify: 0 if all are sound, 1 if one is damaged or unverified.",
        config=None,
    )
    runs.usage = "megappo runs [DIR] [--json]\n       megappo runs verify RUN [--step N] [--json]"
    runs.add_argument("words", metavar="DIR", nargs="*", help="run.output_dir, or one run in it (default: runs)")
    runs.add_argument("--step", type=positive_int, metavar="N", help="verify this checkpoint alone")
    runs.add_argument("--json", action="store_true", help="print JSON for scripts: one object per run or checkpoint")


def main(args: argparse.Namespace) -> int:
    from megappo.commands.runs.report import show_runs, show_verified

    match args.words:
        case ["verify", run_dir]:
            return show_verified(Path(run_dir), args.step, as_json=args.json)
        case ["verify", *_]:
            raise ConfigError("runs verify: name one run, as in `megappo runs verify runs/NAME` (a directory `verify`: ./verify)")
        case [] | [_] if args.step is None:
            return show_runs(Path(*args.words or ["runs"]), as_json=args.json)
        case [] | [_]:
            raise ConfigError(f"--step {args.step} is of `megappo runs verify RUN`, and has no effect without it")
        case _:
            raise ConfigError(f"runs: one directory, not {len(args.words)} ({' '.join(args.words)})")
