"""`megappo trajectories`: tables of a run's sampled trajectories, and a page of them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megappo.commands.parser import AddCommand, non_negative_int, positive_int
from megappo.config.errors import ConfigError

WORST = 3


def add_command(command: AddCommand) -> None:
    parser = command(
        "trajectories",
        main,
        "Show a run's sampled trajectories: score, length, repetition and KL by step, and the worst samples.",
        "--html writes a page that shows their tokens coloured by log-prob, advantage, value and others. Reads the run's files "
        "alone, also beside a live run; docs/telemetry.md explains the tables.",
        config=None,
    )
    add = parser.add_argument
    add("run_dir", metavar="RUN", help="directory of a run (output_dir/name), or a folder with its step_*.jsonl")
    add("--steps", metavar="A..B", help="these steps alone: 10, 10..20, 10.. or ..20 (default: all that were written)")
    add("--worst", type=non_negative_int, default=WORST, metavar="N", help=f"worst samples of each kind to list (default: {WORST})")
    add("--html", metavar="OUT.html", help="write a page to look at in a browser: one file, no server and no network needed")
    add(
        "--max-samples",
        type=positive_int,
        metavar="N",
        help="samples on the page at most, the worst of each kind first (default: 200, of 400,000 tokens in all)",
    )


def main(args: argparse.Namespace) -> int:
    """Print the tables of a run and write its page. Raises ConfigError, one line, before anything is printed or written."""
    from megappo.commands.trajectories.analyse import LEGEND, analyse, report
    from megappo.config.output_file import check_output_file
    from megappo.telemetry.tables import plain
    from megappo.telemetry.trajectories.read import parse_steps, read_run

    folder = Path(args.run_dir)
    target = None if args.html is None else check_output_file("--html", args.html, (".html", ".htm"))
    if target is None and args.max_samples is not None:
        raise ConfigError(f"--max-samples {args.max_samples} is of the page, and has no effect without --html OUT.html")
    sampled = read_run(folder, parse_steps(args.steps) if args.steps else (0, None))
    analysis = analyse(sampled.trajectories, args.worst)
    notes = list(sampled.notes)
    if target is not None:
        from megappo.commands.trajectories.page import page

        text, more = page(analysis, folder.resolve().name, args.max_samples, notes)
        notes += more
        _write(target, text, sampled.mode)
    steps = [one.step for one in analysis.steps]
    span = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps ({steps[0]} to {steps[-1]})"
    print(f"{plain(folder)}: {len(analysis.samples):,} samples of {span}\n")
    print("\n".join([*report(analysis), "", LEGEND]))
    if target is not None:
        print(f"\npage: {target} ({target.stat().st_size / 1e6:.1f} MB)")
    if notes:
        print("\n" + "\n".join(f"note: {plain(note)}" for note in notes))
    return 0


def _write(target: Path, text: str, mode: int) -> None:
    """Write the page, readable only by those who may read the samples. Raises ConfigError if it cannot be written."""
    from megappo.telemetry.jsonl import replace_file

    previous = os.umask(0o077)
    os.umask(previous | (0o777 & ~mode))
    try:
        replace_file(target, text.encode("utf-8"))
    except OSError as error:
        raise ConfigError(f"--html {target}: {error.strerror}") from None
    finally:
        os.umask(previous)
