#!/usr/bin/env python
"""Train under faults and compare the end with a clean run, bit for bit: python benchmarks/chaos.py CONFIG --faults 10

The configuration runs once without faults (or --clean names such a run), then under `megappo train --max-restarts` with a seeded
list of faults, put in from outside. Printed: what became of every fault, the share of effective training time, and if the last
checkpoint's tensors and all metrics are equal; of an asynchronous run (rollout.max_staleness >= 1), whose responses are the
clock's, if it was trained on the same prompts. docs/reliability.md explains the faults and the figures.

Exit codes: 0; 1 if a fault was not survived or the ends differ; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.reliability.compare import Comparison, compare, compare_samples
from benchmarks.reliability.faults import KINDS, MEANING
from benchmarks.reliability.live import LiveRun, Row
from benchmarks.reliability.own_faults import HOOK
from benchmarks.reliability.soak import HEADING, Injection, Outcome, Soak, draw, productive_s, wall_s
from megappo.commands.parser import non_negative_int, positive_int
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.config.rank_ranges import ranks_of
from megappo.config.run_directory import check_run_dir
from megappo.config.schema import TrainConfig
from megappo.telemetry.tables import table

SITE = ROOT / "scripts" / "after_import"
RUN_LIMIT_S = 24 * 3600.0


@dataclass(frozen=True)
class Report:
    """clean_s, faulty_s: from the beginning of the first step to the end of the last. rows: of both runs."""

    outcomes: list[Outcome]
    exit_code: int
    clean_rows: list[Row]
    faulty_rows: list[Row]
    comparison: Comparison | None

    @property
    def clean_s(self) -> float:
        return wall_s(self.clean_rows)

    @property
    def faulty_s(self) -> float:
        return wall_s(self.faulty_rows)

    @property
    def ettr(self) -> float:
        """Effective training time ratio: share of the run's time in steps that count. The speed of the machine cancels out."""
        return productive_s(self.faulty_rows) / self.faulty_s

    @property
    def passed(self) -> bool:
        survived = not any(outcome.wrong for outcome in self.outcomes)
        return survived and self.exit_code == 0 and self.comparison is not None and not self.comparison.differing


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("config", metavar="CONFIG", help="YAML file of a PPO run with trainer.steps and checkpoint.save_every")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--faults", type=positive_int, default=10, metavar="N", help="number of faults (default: 10)")
    kinds = "; ".join(f"{name}: {meaning}" for name, meaning in MEANING.items())
    parser.add_argument("--kinds", metavar="A,B", help=f"kinds of faults (default: all): {kinds}")
    parser.add_argument("--seed", type=non_negative_int, default=0, metavar="S", help="of the list of faults (default: 0)")
    parser.add_argument("--ranks", type=positive_int, metavar="N", help="sets run.num_ranks")
    parser.add_argument(
        "--max-restarts",
        type=non_negative_int,
        metavar="N",
        help="of `megappo train` (default: as many as faults); 0: this script runs it again with --resume, for comparison",
    )
    parser.add_argument("--clean", type=Path, metavar="RUN", help="directory of a finished clean run of this configuration")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        report = measure(words)
    except ConfigError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    return 0 if report.passed else 1


def measure(words: Sequence[str]) -> Report:
    """Run as the command line says, and print the report. ConfigError for wrong arguments or a clean run that fails."""
    args = build_parser().parse_intermixed_args(list(words))
    if args.ranks is not None:
        args.overrides.append(f"run.num_ranks={args.ranks}")
    config = load_config(args.config, args.overrides)
    injections = plan(config, args.faults, args.seed, args.kinds)
    for name in ("chaos", *(() if args.clean else ("clean",))):
        check_run_dir(named(config, name).run, resume=False)
    max_restarts = args.faults if args.max_restarts is None else args.max_restarts
    report = run(args.config, args.overrides, config, injections, max_restarts, args.clean)
    print_report(report)
    print(f"the same faults again: python benchmarks/chaos.py {shlex.join(with_seed(words, args.seed))}")
    return report


def with_seed(words: Sequence[str], seed: int) -> list[str]:
    return list(words) if any(word.startswith("--seed") for word in words) else [*words, "--seed", str(seed)]


def named(config: TrainConfig, suffix: str) -> TrainConfig:
    run = config.run.model_copy(update={"name": f"{config.run.name}-{suffix}"})
    return config.model_copy(update={"run": run})


def plan(config: TrainConfig, faults: int, seed: int, kinds: str | None) -> list[Injection]:
    """The seeded list of faults. ConfigError if the run is no place for them."""
    ranks, save_every, steps = config.run.num_ranks or 1, config.checkpoint.save_every, config.trainer.steps
    if steps is None:
        raise ConfigError("trainer.steps = null: faults are drawn over the steps of a run; set it")
    if not isinstance(save_every, int) or save_every < 1:
        raise ConfigError(
            f"checkpoint.save_every = {save_every}: faults are counted in saves; set a number of steps, for example 2"
        )
    training_ranks = ranks
    if config.rollout.max_staleness is not None:
        training_ranks = ranks_of(config.rollout.ranks, ranks)[0]
        samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
        if config.rollout.max_staleness and (
            config.telemetry.trajectories_every != 1 or config.telemetry.trajectories_per_step < samples
        ):
            raise ConfigError(
                "the trajectories must show all that an asynchronous run was trained on; set telemetry.trajectories_every=1 "
                f"telemetry.trajectories_per_step={samples}"
            )
    # One rank has no other one whose disk could fill up, and a save after every step keeps every skipped update.
    impossible = {"full": ranks < 2, "nan": save_every < 2}
    chosen = [kind for kind in KINDS if not impossible.get(kind)] if kinds is None else kinds.split(",")
    for kind in chosen:
        if kind not in KINDS:
            raise ConfigError(f"--kinds {kinds}: {kind or 'an empty name'} is no fault; there are {', '.join(KINDS)}")
        if impossible.get(kind):
            raise ConfigError(f"--kinds {kinds}: {kind} needs {'two ranks' if kind == 'full' else 'checkpoint.save_every >= 2'}")
    return draw(chosen, faults, seed, steps=steps, save_every=save_every, ranks=ranks, training_ranks=training_ranks)


def run(
    path: str, overrides: Sequence[str], config: TrainConfig, injections: Sequence[Injection], max_restarts: int, clean: Path | None
) -> Report:
    """Run clean, unless there is such a run, and under the faults. ConfigError if the clean run did not reach its last step."""
    with tempfile.TemporaryDirectory(prefix="chaos") as notes:

        def live(suffix: str, *options: str) -> LiveRun:
            output, name = Path(config.run.output_dir), f"{config.run.name}-{suffix}"
            output.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "megappo", "train", path, *overrides, f"run.name={name}", *options]
            return LiveRun(command, output / name, environment(notes), output / f"{name}.log", Path(notes))

        calm = live("clean")
        if clean is None:
            print(f"clean run -> {calm.run_dir}", flush=True)
            calm.start()
            try:
                calm.watch(lambda: calm.exit_code is not None, RUN_LIMIT_S)
            finally:
                calm.close()
        else:
            calm.run_dir = clean
        calm.poll()
        if calm.step != config.trainer.steps:
            said = "" if clean is not None else f"; see {calm.log}"
            raise ConfigError(f"the clean run {calm.run_dir} did not come to step {config.trainer.steps}{said}")
        faulty = live("chaos", *(["--max-restarts", str(max_restarts)] if max_restarts else []))
        print(f"{len(injections)} faults -> {faulty.run_dir}", flush=True)
        limits = config.run.timeouts
        soak = Soak(faulty, Path(notes), config.checkpoint.save_every, limits.heartbeat_s, by_hand=max_restarts == 0)
        try:
            outcomes, code = soak.run(injections, lambda outcome: print(f"  {told(outcome)}", flush=True))
        finally:
            faulty.close()
    compared = compare_samples if config.rollout.max_staleness else compare
    comparison = compared(calm.run_dir, faulty.run_dir) if code == 0 else None
    return Report(outcomes, code, calm.rows, faulty.rows, comparison)


def environment(notes: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(SITE), str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "AFTER_IMPORT": HOOK, "MEGAPPO_CHAOS": notes, "PYTHONPATH": path}


def told(outcome: Outcome) -> str:
    return f"step {outcome.at}, {outcome.injection.kind}: {outcome.said or 'nothing'}" + (
        f"; NOT SURVIVED: {outcome.wrong}" if outcome.wrong else ""
    )


def print_report(report: Report) -> None:
    print("\n".join(table(HEADING, [outcome.cells() for outcome in report.outcomes])))
    survived = sum(not outcome.wrong for outcome in report.outcomes)
    print(f"survived: {survived} of {len(report.outcomes)}; the command ended with exit code {report.exit_code}")
    if report.faulty_rows:
        per_step = [statistics.median(row.seconds for row in rows) for rows in (report.clean_rows, report.faulty_rows)]
        times = f"{report.faulty_s:.1f} s with faults, {report.clean_s:.1f} s without"
        print(f"effective training time: {report.ettr:.1%} ({times}; {per_step[1]:.2f} and {per_step[0]:.2f} s/step)")
    equal = "the same samples" if report.comparison and report.comparison.samples else "end equal bit for bit"
    print(f"{equal}: {report.comparison or 'no: the run did not come to its end'}")


if __name__ == "__main__":
    sys.exit(main())
