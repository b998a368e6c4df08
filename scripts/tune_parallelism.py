#!/usr/bin/env python
"""Rank the parallel layouts of a run on given GPUs by a model of its step time, and write the best as overrides.

    scripts/tune_parallelism.py configs/large/llama3.1_70b_64gpu.yaml --gpus 64 --gpu h200 \\
        policy.model=configs/models/Llama-3.1-70B-Instruct

docs/tuning.md explains the tables. Exit codes are those of `megappo`: 2 for a mistake, with one line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

ROOT = str(Path(__file__).resolve().parent.parent)
sys.path.insert(0, ROOT)

from megappo.config.errors import ConfigError
from megappo.platform.quiet import quiet_libraries


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def build_parser() -> Parser:
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("config", metavar="CONFIG", nargs="?", help="YAML file of the run (none with --probe: only measure this machine)")
    add("overrides", metavar="key=value", nargs="*", help="keys set over the file")
    add("--gpus", type=int, metavar="N", help="ranks, one per GPU (default: run.num_ranks)")
    add("--gpu", metavar="NAME", help="a100, h100, h200, b200, cpu, or a YAML file with one (default: cpu with run.device=cpu)")
    add("--gpus-per-node", type=int, metavar="N", help="GPUs that share the fast link (default: the profile's)")
    add("--roles", metavar="A,B", help="roles whose layout is open (default: all, rollout among them); the others keep theirs")
    add("--top", type=int, default=10, metavar="N", help="rows of a table (default: 10)")
    add("--mean-prompt-tokens", type=float, metavar="N", help="of a sequence on average (default: data.max_prompt_tokens)")
    add("--mean-response-tokens", type=float, metavar="N", help="the same (default: rollout.max_response_tokens)")
    add("--measure", type=int, metavar="K", help="run short trials of the best K and rank them by what was measured")
    add("--probe", action="store_true", help="measure this machine and rank by that instead of a profile")
    add("--output", metavar="FILE", help="write the winner: a whole configuration (.yaml), or its key=value lines")
    add("--json", metavar="FILE", help="write the ranking")
    add = parser.add_argument_group("trials as a job").add_argument
    add("--slurm", action="store_true", help="run the trials of --measure as a job of Slurm instead of here")
    add("--partition", metavar="NAME", help="Slurm's partition")
    add("--account", metavar="NAME", help="Slurm's account")
    add("--time", metavar="TIME", help="longest time of the job, for example 30:00")
    add("--sbatch", action="append", metavar="OPTION", help="another option of sbatch, e.g. --sbatch=--exclusive")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    quiet_libraries()
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != ROOT]
    os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *paths])  # for the ranks of trials and of the probe
    try:
        args = _parse(argv)
        return run(args)
    except ConfigError as error:
        print(f"tune_parallelism: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader (head, less) went away; Python would complain again while it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    args, rest = build_parser().parse_known_args(argv)
    args.overrides = [*args.overrides, *rest]
    for option, value in (("--top", args.top), ("--measure", args.measure), ("--gpus-per-node", args.gpus_per_node)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: must be >= 1")
    if args.slurm and args.measure is None:
        raise ConfigError("--slurm runs the trials of --measure K as a job, and has no effect without it")
    for option in ("partition", "account", "time", "sbatch"):
        if getattr(args, option) is not None and not args.slurm:
            raise ConfigError(f"--{option} is of the job of --slurm, and has no effect without it")
    if args.probe and args.config is None:
        for name in ("gpus", "gpus-per-node", "roles", "mean-prompt-tokens", "mean-response-tokens", "measure", "output", "json"):
            if getattr(args, name.replace("-", "_")) is not None:
                raise ConfigError(f"--{name} has no effect: --probe without CONFIG only measures this machine")
    return args


def run(args: argparse.Namespace) -> int:
    from megappo.plan.report import remark_lines
    from megappo.tune import command
    from megappo.tune.profiles import dump_hardware, load_hardware
    from megappo.tune.report import overrides_of, report

    named = {"--output": args.output, "--json": args.json}
    targets = {option: command.check_target(option, text) for option, text in named.items() if text}
    if args.probe and args.gpu is not None:
        raise ConfigError(f"--gpu {args.gpu}: --probe measures this machine instead; leave one of the two out")
    if args.config is not None:  # before a probe, which takes half a minute
        gpus = command.num_gpus(args.gpus, args.config, args.overrides)
    if args.probe:
        from megappo.tune.probe import probe

        hardware = probe()
        print(dump_hardware(hardware), end="", flush=True)
        if args.config is None:
            return 0
    if args.config is None:
        raise ConfigError("CONFIG is missing: a YAML file, see docs/config.md")
    if not args.probe:
        hardware = load_hardware(args.gpu or command.default_profile(args.config, args.overrides))
    if args.gpus_per_node is not None:
        hardware = replace(hardware, gpus_per_node=args.gpus_per_node)
    question = command.Question(
        args.config,
        tuple(args.overrides),
        gpus,
        hardware,
        tuple(part.strip() for part in args.roles.split(",")) if args.roles is not None else None,
        args.mean_prompt_tokens,
        args.mean_response_tokens,
    )
    search = command.make_search(question)
    job = None
    if args.measure is not None:
        from megappo.tune.measure import best_measured, check_measurable, measure

        check_measurable(search)
    if args.slurm:
        from megappo.launch.submit import Limits
        from megappo.tune.job import job_for

        job = job_for(search.machine, Limits(args.partition, args.account, args.time), args.sbatch or ())
    choice = command.find_best(search)
    print(report(search, choice, args.top), flush=True)
    measurement = None
    if args.measure is not None:
        measurement = measure(search, choice, args.measure, job)
        print(measurement.report())
        choice = best_measured(search, choice, measurement)
    prepared = command.prepare_chosen(search, choice, question)
    if remarks := remark_lines(prepared.plan, prepared.notes):
        print("\n".join(remarks) + "\n")
    overrides = overrides_of(search, choice)
    print("overrides\n" + "\n".join(f"  {line}" for line in overrides))
    if "--output" in targets:
        command.write_output(targets["--output"], prepared.plan.config, overrides)
    if "--json" in targets:
        measured = measurement.facts() if measurement is not None else None
        targets["--json"].write_text(command.as_json(search, choice, args.top, prepared, measured), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
