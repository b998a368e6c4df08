"""Train small experiments on PPO with a critic: python -m benchmarks.experiments --folder DIR [--tasks A,B] [--arms A,B] [--seeds
1,2]

Trains every arm of every task from every seed on one CPU rank, one run after the other, and writes docs/experiments.json,
docs/experiments.md and docs/images/experiment_*.svg. Runs that have finished in --folder are not repeated, and figures of runs that
are not there stay. `--only-page` trains
nothing: it reads what has finished there, or without --folder writes page and pictures anew from docs/experiments.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_reliability import machine
from benchmarks.experiments import page, runs
from benchmarks.experiments.arms import ARMS, EXPERIMENTS
from benchmarks.experiments.results import read_results
from benchmarks.experiments.tasks import TASKS


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experiments", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS), metavar="A,B", help=f"of {', '.join(TASKS)} (default: all)")
    parser.add_argument("--arms", default=",".join(ARMS), metavar="A,B", help=f"of {', '.join(ARMS)} (default: all)")
    parser.add_argument("--seeds", default="1,2,3", metavar="A,B", help="run.seed of the runs (default: 1,2,3)")
    parser.add_argument("--folder", type=Path, help="where tasks and runs are kept")
    parser.add_argument("--only-page", action="store_true", help="train nothing, write the page")
    args = parser.parse_args(argv)
    tasks, arms = chosen(parser, "tasks", args.tasks, TASKS), chosen(parser, "arms", args.arms, ARMS)
    if not all(seed.isdigit() for seed in args.seeds.split(",")):
        parser.error(f"--seeds {args.seeds}: name whole numbers, for example 1,2,3")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    if args.folder is None and not args.only_page:
        parser.error("--folder: name a directory for the tasks and the runs, which is kept")
    if args.folder is not None:
        folder = args.folder.absolute()
        if not args.only_page:
            train_all(folder, tasks, arms, seeds)
        known = json.loads(page.FIGURES.read_text("utf-8"))["results"]
        figures = {"machine": machine(), "seeds": seeds, "results": read_results(folder, seeds, known)}
        page.FIGURES.write_text(json.dumps(figures, separators=(",", ":")) + "\n", encoding="utf-8")
    write_page()


def chosen(parser: argparse.ArgumentParser, option: str, text: str, known: Collection[str]) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--{option} {text}: there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def train_all(folder: Path, tasks: Sequence[str], arms: Sequence[str], seeds: Sequence[int]) -> None:
    # By arms first: where time ends, those that were begun have all tasks and seeds.
    wanted = [(task, arm, seed) for arm in arms for seed in seeds for task in tasks]
    left = [run for run in wanted if not runs.is_finished(runs.directory(folder, *run))]
    for number, run in enumerate(left, 1):
        start = time.monotonic()
        runs.train(folder, *run)
        print(f"{number}/{len(left)} {'-'.join(map(str, run))}: {time.monotonic() - start:.0f} s", flush=True)


def write_page() -> None:
    figures = json.loads(page.FIGURES.read_text("utf-8"))
    page.PAGE.write_text(page.render(page.TEMPLATE.read_text("utf-8"), figures), encoding="utf-8")
    for path in (page.PAGE, *(page.draw(figures["results"], name) for name in EXPERIMENTS)):
        print(f"wrote {path.relative_to(ROOT)}")
    print(page.missing_text(figures["results"], figures["seeds"]))


if __name__ == "__main__":
    main()
