"""`megappo tune`: search, tables, trials, and the winner's files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeVar

from megappo.commands.plan.report import remark_lines
from megappo.commands.plan.run import PlannedRun, plan_run
from megappo.commands.plan.supervised import POLICY, as_planned, own_keys, planned_step, unpassed_roles
from megappo.commands.runs.read import read_rows
from megappo.commands.tune.candidates import ROLLOUT, Candidate, Choice, Machine
from megappo.commands.tune.cost import Workload, workload_of
from megappo.commands.tune.lengths import MOST_SPREAD, SPREAD, Lengths, Turns, seen_lengths
from megappo.commands.tune.measure import best_measured, check_measurable, measure, measured_facts, measured_lines
from megappo.commands.tune.placing import COLOCATED, Placed, Placing, placement_facts, placement_lines, placings, rank_placements
from megappo.commands.tune.report import name_of, overrides_of, report
from megappo.commands.tune.search import Search, gpus_needed, larger_worlds
from megappo.commands.tune.written import factors, measured_stages, written_facts, written_lines
from megappo.config.batch import step_arithmetic
from megappo.config.checks import check_config
from megappo.config.dump import dump_yaml
from megappo.config.environment_sections import EnvironmentConfig
from megappo.config.errors import ConfigError, problem
from megappo.config.layout_checks import placements_in_use, require_whole_steps, role_sections, roles_in_use
from megappo.config.loading import explicit_keys, load_run
from megappo.config.output_file import check_output_file
from megappo.config.rank_ranges import ALL
from megappo.config.role_sections import ParallelConfig, key_of_role, section_of, with_sections
from megappo.config.run_directory import METRICS
from megappo.config.schema import TrainConfig
from megappo.config.supervised import AnyConfig, SupervisedConfig
from megappo.models.implementation import choose_implementation
from megappo.rollout.vllm_limits import check_vllm
from megappo.runtime.ending import input_accepted
from megappo.telemetry.hardware import Hardware, dump_hardware, load_hardware
from megappo.telemetry.metrics import Metric
from megappo.telemetry.trajectories.read import Trajectory, read_run
from megappo.trainer.prepare.hub import with_local_models
from megappo.trainer.prepare.layouts import check_layouts, read_archs

ConfigT = TypeVar("ConfigT", bound=AnyConfig)
ANSWER = Metric.ENVIRONMENT_MEAN.value


def make_search(run: AnyConfig, args: argparse.Namespace) -> Search:
    """Build the search that the options ask for. ConfigError, one line, if they do not fit together."""
    if isinstance(run, SupervisedConfig):
        _check_supervised(run, args)
    config = planned_step(run)
    gpus = args.gpus if args.gpus is not None else config.run.num_ranks
    if gpus is None:
        raise ConfigError("--gpus is missing: how many GPUs the run will have (run.num_ranks does not say)")
    if args.gpu is None and config.run.device != "cpu":
        raise ConfigError("--gpu is missing: a100, h100, h200, h20, b200, gb200, or a YAML file with a profile")
    hardware = load_hardware(args.gpu or "cpu")
    if args.gpus_per_node is not None:
        hardware = replace(hardware, gpus_per_node=args.gpus_per_node)
    _check_gpus(gpus, hardware)
    require_whole_steps(config, "tune")
    config = config.model_copy(update={"run": config.run.model_copy(update={"num_ranks": gpus})})
    if args.placements:
        _check_placements(config)
    roles = None if args.roles is None else [part.strip() for part in args.roles.split(",")]
    if roles is not None and isinstance(run, SupervisedConfig):
        roles = [POLICY if role == run.learner else role for role in roles]
    tuned = () if args.as_is else _tuned_roles(config, roles)
    implementation = choose_implementation(config.model.impl, "cuda" if hardware.is_gpu() else "cpu")
    machine = Machine(gpus, hardware, implementation)
    neutral = neutral_config(config, tuned)
    if args.placements and config.rollout.max_staleness is not None:
        # It needs ranks apart, which are to be chosen: any will do for the other checks
        apart = (one for one in placings(neutral, machine) if one.name != COLOCATED)
        neutral = next(apart, Placing("", {})).applied(neutral)
    if isinstance(run, SupervisedConfig):  # whose step is no run that could be started
        own = neutral_config(run, [run.learner if role == POLICY else role for role in tuned])
        check_config(own, explicit_keys(own), gpus, machine.device)
    else:
        check_config(neutral, explicit_keys(neutral), gpus, machine.device)
    archs = as_planned(run, read_archs(run))
    check_layouts(neutral, archs, gpus, implementation)
    if config.rollout.engine == "vllm":
        tokens, in_fp32 = step_arithmetic(config).max_sequence_tokens, config.policy.dtype == "fp32"
        check_vllm(archs["policy"], tokens, machine.device, in_fp32)
    workload = replace(_workload(config, args), given=isinstance(run, SupervisedConfig), unpassed=unpassed_roles(run))
    return Search(config, archs, machine, workload, tuned)


def _check_supervised(config: SupervisedConfig, args: argparse.Namespace) -> None:
    """Raise ConfigError for an option about what a run of examples does not do, and for what is no part of its step."""
    if config.sampler is not None:
        fix = "tune lays out a training step, which generates nothing; add rollout=null reward=null, and plan the result with them"
        raise ConfigError(problem("rollout.engine", config.sampler.engine, fix))
    for option in ("placements", "mean_response_tokens", "spread", "lengths", "measure", "calibrate"):
        if getattr(args, option) is not None:
            name, kind = option.replace("_", "-"), config.name
            fix = "--mean-prompt-tokens are those of a whole sequence" if "mean" in option else "leave it out"
            raise ConfigError(f"--{name}: of runs that generate, and this is of kind {kind}; {fix}")


def _check_gpus(gpus: int, hardware: Hardware) -> None:
    if gpus > hardware.gpus_per_node and gpus % hardware.gpus_per_node:
        below = gpus // hardware.gpus_per_node * hardware.gpus_per_node
        fitting = f"use {below} or {below + hardware.gpus_per_node}, or --gpus-per-node"
        raise ConfigError(f"--gpus {gpus}: is not a multiple of the {hardware.gpus_per_node} GPUs of a node; {fitting}")


def _check_placements(config: TrainConfig) -> None:
    # The user may not place roles where placements are to be searched.
    for name, ranks in placements_in_use(config).items():
        if ranks != ALL:
            key = f"{key_of_role(name)}.ranks"
            fix = f"--placements would choose others; leave it out to search layouts on these ranks, or use {key}={ALL}"
            raise ConfigError(problem(key, ranks, fix))


_ABSENT = {
    ROLLOUT: "is not there: rollout.engine is megatron",
    "reference": "is not built: algorithm.kl.placement is none, or policy.lora has the reference in the policy",
    "teacher": "is not built: algorithm.distillation is not set",
    "reward_model": "is not built: no part of the reward is {model: reward_model}",
}


def _tuned_roles(config: TrainConfig, asked: Sequence[str] | None) -> tuple[str, ...]:
    there = [*roles_in_use(config), *([ROLLOUT] if config.rollout.engine == "vllm" else [])]
    for role in asked or ():
        if role in there:
            continue
        known = (*role_sections(config), ROLLOUT)
        why = _ABSENT.get(role, "is not built in this run") if role in known else "is no role"
        raise ConfigError(f"--roles {role}: {why}; use {', '.join(there)}")
    return tuple(asked) if asked is not None else tuple(there)


def neutral_config(config: ConfigT, tuned: Sequence[str]) -> ConfigT:
    """Remove the layouts that are to be chosen, so that all other mistakes are reported at once. Unset keys stay unset."""
    changes: dict[str, Any] = {}
    for role in tuned:
        section = section_of(config, role)
        changes[role] = section.model_copy(update={"tp": 1} if role == ROLLOUT else {"parallel": ParallelConfig()})
    return with_sections(config, changes)


def _workload(config: TrainConfig, args: argparse.Namespace) -> Workload:
    longest = config.rollout.max_response_tokens
    prompt = _mean(args, "prompt", args.mean_prompt_tokens, config.data.max_prompt_tokens, Metric.PROMPT_MEAN)
    if args.lengths is not None:
        return _seen_workload(config, args, prompt)
    response = _mean(args, "response", args.mean_response_tokens, longest, Metric.RESPONSE_MEAN)
    if args.spread is not None and response is None:
        raise ConfigError(
            f"--spread {args.spread:g}: lengths have a spread around a mean, which is missing; give --mean-response-tokens"
        )
    if args.spread is not None and not 0 <= args.spread <= MOST_SPREAD:
        raise ConfigError(f"--spread {args.spread:g}: must be between 0 (all responses are alike) and {MOST_SPREAD:g}")
    if response is None:
        return workload_of(config, prompt)
    spread = SPREAD if args.spread is None else args.spread
    return workload_of(config, prompt, response, Lengths(response, float(longest), spread))


def _mean(args: argparse.Namespace, what: str, given: float | None, most: int, metric: Metric) -> float | None:
    """Mean tokens of prompts or responses: as given, or else as the run of --calibrate logged them."""
    option, mean_tokens = f"--mean-{what}-tokens", given
    if given is None and args.calibrate is not None:
        logged = [row[metric.value] for row in read_rows(Path(args.calibrate)).values() if row.get(metric.value) is not None]
        option, mean_tokens = f"--calibrate {args.calibrate}: its {what}s of", median(logged) if logged else None
    if mean_tokens is not None and not 0 < mean_tokens <= most:
        raise ConfigError(f"{option} {mean_tokens:g}: must be > 0 and at most the longest, {most}")
    return mean_tokens


def _seen_workload(config: TrainConfig, args: argparse.Namespace, prompt: float | None) -> Workload:
    """Workload with the lengths that a run drew."""
    if args.mean_response_tokens is not None or args.spread is not None:
        raise ConfigError(
            "--lengths: the run's responses have their own mean and spread; leave out --mean-response-tokens and --spread"
        )
    trajectories = read_run(Path(args.lengths)).trajectories
    seen = seen_lengths([one.length for one in trajectories], float(config.rollout.max_response_tokens))
    environment = config.rollout.environment
    turns = None if environment is None else seen_turns(Path(args.lengths), trajectories, environment)
    return workload_of(config, prompt, seen.mean, seen, turns)


def seen_turns(run: Path, trajectories: Sequence[Trajectory], environment: EnvironmentConfig) -> Turns | None:
    """Turns of a run's trajectories; None if it logged no seconds of its environment."""
    answers = [row[ANSWER] for row in read_rows(run).values() if row.get(ANSWER) is not None] if (run / METRICS).exists() else []
    if not answers:
        return None
    turns = [1 + int((one.mask[1:] & ~one.mask[:-1]).sum()) for one in trajectories]
    observed = [len(one.mask) - one.length for one in trajectories]
    together = environment.join == "together"
    return Turns(mean(turns), mean(observed), median(answers), environment.workers, together)


def find_best(search: Search) -> Choice:
    """The fastest run that fits. ConfigError, with the number of GPUs needed, if none does."""
    best = search.best()
    if best is not None:
        return best
    machine = search.machine
    resting = all("parameters" in section_of(search.config, role).offload for role in search.candidates)
    offload = "" if resting or machine.device == "cpu" else ", or offload (policy.offload)"
    kept = [role for role in search.candidates if role not in search.tuned]
    beside = f" beside the {' and the '.join(kept)} as configured" if kept else ""
    what = f"no layout fits on {machine.world_size} x {machine.hardware.name}{beside}"
    if not all(one.is_whole for one in search.placements.values()):  # larger worlds have other ranks
        where = ", ".join(
            f"{key_of_role(name)}.ranks={placement}" for name, placement in search.placements.items() if not placement.is_whole
        )
        raise ConfigError(f"--gpus {machine.world_size}: {what} with {where}; name more ranks, or let roles share them{offload}")
    needed = gpus_needed(search)
    if needed is not None:
        raise ConfigError(f"--gpus {machine.world_size}: {what}; it needs about {needed} (found by doubling){offload}")
    fix = f"lower rollout.memory_share, shorten the sequences{offload}"
    raise ConfigError(f"--gpus {machine.world_size}: {what}, and not on {larger_worlds(machine)[-1]} either; {fix}")


def facts_of(search: Search, choice: Choice, top: int, planned: PlannedRun) -> dict[str, Any]:
    """The content of the tables for JSON, in seconds and bytes, with the remarks of the plan."""
    tables: dict[str, Any] = {
        role: [_facts(one) for one in search.beside(choice, role)[:top]] for role in choice.roles if role in search.tuned
    }
    if ROLLOUT in search.tuned:
        tables[ROLLOUT] = [
            {"tp": one.tp, "seconds": one.total_s, "bytes": search.choice(choice.roles, one).plan.rollout_bytes()}
            for one in search.rollouts_beside(choice)[:top]
        ]
    return {
        "gpus": search.machine.world_size,
        "hardware": search.machine.hardware.name,
        "step_seconds": choice.total_s,
        "peak_bytes": choice.peak,
        "overrides": overrides_of(search, choice),
        "notes": list(planned.notes),
        "warnings": list(planned.plan.warnings),
        "roles": tables,
    }


def _facts(one: Candidate) -> dict[str, Any]:
    return {
        "layout": name_of(one),
        "overrides": one.overrides(),
        "seconds": one.total_s,
        "phases": dict(one.cost.phases),
        "parts": dict(one.cost.parts),
        "resident_bytes": one.need.resident,
        "active_bytes": one.need.training,
    }


def tune(args: argparse.Namespace, config: AnyConfig) -> int:
    """Run the command; returns the exit code. ConfigError for a user's mistake."""
    named = {"--output": args.output, "--json": args.json}
    targets = {option: check_output_file(option, text) for option, text in named.items() if text}
    for option in ("roles", "placements", "measure", *(() if args.calibrate else ("output",))) if args.as_is else ():
        if getattr(args, option) is not None:
            with_run = ", or give --calibrate RUN, whose profile it writes" if option == "output" else ""
            raise ConfigError(f"--as-is searches nothing, so that --{option} has no effect; leave out one of them{with_run}")
    if args.calibrate is not None and not args.as_is:
        fix = "give --as-is with it, and --output FILE for a profile that a search takes with --gpu FILE"
        raise ConfigError(f"--calibrate: a run is held against its own configuration; {fix}")
    search = make_search(config, args)
    if args.as_is:
        return _price(args, search, targets)
    if args.measure is not None:
        check_measurable(search, in_job=args.slurm)
    with input_accepted(unless=(ConfigError,)):  # the search and the trials find out what cannot work
        ranked = rank_placements(search, neutral_config(search.config, search.tuned)) if args.placements else ()
        search, choice = _first(ranked, search, args)
        print(report(search, choice, args.top), flush=True)
        facts: dict[str, Any] = {"placements": placement_facts(ranked)} if ranked else {}
        if args.measure is not None:
            measurement = measure(search, choice, args.measure, in_job=args.slurm)
            print("\n".join(measured_lines(measurement)))
            facts["measured"] = measured_facts(measurement)
            choice = best_measured(search, choice, measurement)
        overrides, machine = [own_keys(config, line) for line in overrides_of(search, choice)], search.machine
        written = load_run(args.config, [*args.overrides, *overrides])  # with the user's names of models; the last key counts
        chosen = with_local_models(written, shapes_only=True)
        planned = plan_run(chosen, machine.world_size, machine.device, machine.device_memory, shapes_only=True)
        if remarks := remark_lines(planned.plan, planned.notes):
            print("\n".join(remarks) + "\n")
        print("overrides\n" + "\n".join(f"  {line}" for line in overrides))
        if (target := targets.get("--output")) is not None:
            whole = target.suffix in (".yaml", ".yml")
            target.write_text(dump_yaml(written) if whole else "".join(f"{line}\n" for line in overrides), encoding="utf-8")
        if "--json" in targets:
            facts |= facts_of(search, choice, args.top, planned) | {"overrides": overrides}
            targets["--json"].write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0


def _price(args: argparse.Namespace, search: Search, targets: Mapping[str, Path]) -> int:
    """Print the step of the configuration as it is written."""
    measured = None if args.calibrate is None else measured_stages(Path(args.calibrate))
    choice = search.as_written()
    print("\n".join(written_lines(search, choice, measured)))
    if measured is not None and (target := targets.get("--output")) is not None:
        hardware = search.machine.hardware
        own = replace(hardware, calibration=hardware.calibration.times(factors(choice, measured)))
        target.write_text(dump_hardware(own), encoding="utf-8")
        print(f"  {target} is {hardware.name} with these factors: --gpu {target}, or telemetry.hardware={target} of a run")
    if "--json" in targets:
        targets["--json"].write_text(json.dumps(written_facts(choice), indent=1) + "\n", encoding="utf-8")
    return 0


def _first(ranked: Sequence[Placed], search: Search, args: argparse.Namespace) -> tuple[Search, Choice]:
    """The fastest run, and the search of its placement. ranked: placements, the fastest first; empty if they are not searched."""
    first = next((one for one in ranked if one.choice is not None), None)
    if first is None or first.choice is None:
        return search, find_best(search)  # raises if nothing fits
    print("\n".join(placement_lines(ranked, args.top)), flush=True)
    if args.measure is not None:
        print(f"  trials are of {first.placing.name} alone; the others stay as predicted")
    print()
    return first.search, first.choice
