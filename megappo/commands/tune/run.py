"""`megappo tune`: search, tables, trials, and the winner's files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from megappo.commands.plan.report import remark_lines
from megappo.commands.tune import question as asked
from megappo.commands.tune.candidates import Choice
from megappo.commands.tune.measure import best_measured, check_measurable, measure
from megappo.commands.tune.placing import Placed, placement_facts, placement_lines, rank_placements
from megappo.commands.tune.report import overrides_of, report
from megappo.commands.tune.search import Search
from megappo.config.errors import ConfigError
from megappo.config.output_file import check_output_file
from megappo.config.schema import TrainConfig
from megappo.runtime.ending import input_accepted
from megappo.telemetry.hardware import load_hardware


def tune(args: argparse.Namespace, config: TrainConfig) -> int:
    """Run the command; returns the exit code. ConfigError for a user's mistake."""
    named = {"--output": args.output, "--json": args.json}
    targets = {option: check_output_file(option, text) for option, text in named.items() if text}
    gpus, hardware = asked.num_gpus(args.gpus, config), load_hardware(args.gpu or asked.default_profile(config))
    if args.gpus_per_node is not None:
        hardware = replace(hardware, gpus_per_node=args.gpus_per_node)
    question = asked.Question(
        config,
        args.config,
        tuple(args.overrides),
        gpus,
        hardware,
        tuple(part.strip() for part in args.roles.split(",")) if args.roles is not None else None,
        args.mean_prompt_tokens,
        args.mean_response_tokens,
        bool(args.placements),
    )
    search = asked.make_search(question)
    if args.measure is not None:
        check_measurable(search, in_job=args.slurm)
    with input_accepted(unless=(ConfigError,)):  # the search and the trials find out what cannot work
        ranked = rank_placements(search, asked.neutral_config(search.config, search.tuned)) if args.placements else ()
        search, choice = _first(ranked, search, args)
        print(report(search, choice, args.top), flush=True)
        measurement = None
        if args.measure is not None:
            measurement = measure(search, choice, args.measure, in_job=args.slurm)
            print(measurement.report())
            choice = best_measured(search, choice, measurement)
        prepared = asked.prepare_chosen(search, choice, question)
        if remarks := remark_lines(prepared.plan, prepared.notes):
            print("\n".join(remarks) + "\n")
        overrides = overrides_of(search, choice)
        print("overrides\n" + "\n".join(f"  {line}" for line in overrides))
        if "--output" in targets:
            asked.write_output(targets["--output"], asked.written_choice(search, choice, question), overrides)
        if "--json" in targets:
            measured = measurement.facts() if measurement is not None else None
            placements = placement_facts(ranked) if ranked else None
            facts = asked.as_json(search, choice, args.top, prepared, measured, placements)
            targets["--json"].write_text(facts, encoding="utf-8")
    return 0


def _first(ranked: Sequence[Placed], search: Search, args: argparse.Namespace) -> tuple[Search, Choice]:
    """The fastest run, and the search of its placement. ranked: placements, the fastest first; empty if they are not searched."""
    first = next((one for one in ranked if one.choice is not None), None)
    if first is None or first.choice is None:
        return search, asked.find_best(search)  # raises if nothing fits
    print("\n".join(placement_lines(ranked, args.top)), flush=True)
    if args.measure is not None:
        print(f"  trials are of {first.placing.name} alone; the others stay as predicted")
    print()
    return first.search, first.choice
