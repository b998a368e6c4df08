"""Commands on what a run has written: `megappo runs`, `trajectories`, `gate`, `compare`."""

from __future__ import annotations

import argparse
from pathlib import Path

from megappo.commands.arguments import limit, positive_float, positive_int
from megappo.commands.parser import AddCommand
from megappo.commands.trajectories.options import add_options as add_trajectories_options
from megappo.config.errors import ConfigError


def add_commands(command: AddCommand) -> None:
    runs = command(
        "runs",
        cmd_runs,
        "List the runs below a directory: state, last step, last checkpoint, size on disk, and why a run ended.",
        "`megappo runs verify RUN` reads every byte of a run's checkpoints and compares it with the manifests. Neither changes a "
        "file, and both work beside a live run. Exit code of verify: 0 if all are sound, 1 if one is damaged or unverified.",
        config=None,
    )
    runs.usage = "megappo runs [DIR] [--json]\n       megappo runs verify RUN [--step N] [--json]"
    runs.add_argument("words", metavar="DIR", nargs="*", help="run.output_dir, or one run in it (default: runs)")
    runs.add_argument("--step", type=positive_int, metavar="N", help="verify this checkpoint alone")
    runs.add_argument("--json", action="store_true", help="print JSON for scripts: one object per run or checkpoint")
    add_trajectories_options(
        command(
            "trajectories",
            cmd_trajectories,
            "Analyse a run's sampled trajectories: repetition, score against length, entropy and KL by position, worst samples.",
            "--html writes a page that shows their tokens coloured by log-prob, advantage, value and others. Reads the run's files "
            "alone, also beside a live run; docs/trajectories.md explains the tables.",
            config=None,
        )
    )
    gate = command(
        "gate",
        cmd_gate,
        "Hold the metrics of a run against limits.",
        "GATES is a YAML list of lines such as `eval/score > 0.65 at 40`, `kl/per_token < 0.1 max over 1..40` and "
        "`reward/score_mean >= 0.7 mean over last 10`. Exit code: 0 if all pass, 1 if one fails.",
        config=None,
    )
    gate.add_argument("run_dir", metavar="RUN", help="directory of a run (output_dir/name)")
    gate.add_argument("gates", metavar="GATES", help="YAML file, see docs/evaluation.md")
    compare = command(
        "compare",
        cmd_compare,
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
    add("--tolerance", type=positive_float, metavar="T", help="relative to a metric's largest value, for `apart from` (1e-4)")
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


def cmd_runs(args: argparse.Namespace) -> int:
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


def cmd_trajectories(args: argparse.Namespace) -> int:
    from megappo.commands.trajectories.command import show_trajectories

    return show_trajectories(args)


def cmd_gate(args: argparse.Namespace) -> int:
    from megappo.commands.runs.gate import show_gates

    return show_gates(Path(args.run_dir), Path(args.gates))


def cmd_compare(args: argparse.Namespace) -> int:
    from megappo.commands.runs.compare import Options, compare_runs
    from megappo.commands.runs.curves import DEFAULT_TOLERANCE

    options = Options(
        metrics=tuple(args.metric),
        window=args.window,
        until=args.until,
        tolerance=DEFAULT_TOLERANCE if args.tolerance is None else args.tolerance,
        limits=dict(args.max_difference),
        plot=args.plot,
        as_json=args.json,
    )
    return compare_runs(args.runs, options)
