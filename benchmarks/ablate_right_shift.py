"""Measure what the critic's right shift is worth on the quickstart: python benchmarks/ablate_right_shift.py [--seeds 1,2,3]

V(x_<t), the value of token t, is the value head's output one place before (`algo/alignment.py`). A trainer that forgets to shift
takes the output at t, which has already seen the token: a baseline that knows the action. Both are trained here with the
quickstart's command, configuration and seeds. They differ in one function: `trainer/roles.py` calls `align_values` for the values
of a step and in the critic's loss, and the ranks of a run without the shift replace it by `unshifted` before they train. No key
does so.

Once with the quickstart's lambda of 1, where an advantage is the return less the value, and once with 0.5, where
differences of neighbouring values count too. Longer answers and answers of two turns are among `benchmarks.experiments`.

Takes about two minutes a run on two idle cores; runs that have finished in --folder are not repeated. Prints the table that
docs/engines.md sums up, and writes docs/images/right_shift.svg.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.experiments.arms import unshifted
from benchmarks.experiments.picture import Panel, draw_bands
from benchmarks.experiments.results import EXPLAINED, REWARD, mean
from megappo.commands.compare.curves import Curve, curve_of
from megappo.commands.launch.local import start_ranks
from megappo.commands.runs.read import Rows, read_rows, read_run
from megappo.runtime.world import is_rank
from megappo.telemetry.metrics import Metric

NUM_RANKS, STEPS = 2, 40
LAMBDAS = (1.0, 0.5)
VARIANTS = {"with": "megappo.commands.cli", "without": "benchmarks.ablate_right_shift"}
"""Variant -> module that its ranks run."""
LEAN = (
    "checkpoint.save_every=0",
    "checkpoint.export_at_end=false",
    "telemetry.trajectories_every=0",
    "telemetry.histograms_every=0",
)
OUTPUT = ROOT / "docs" / "images" / "right_shift.svg"
GOAL = 0.9  # mean reward of a step
WINDOW = 10  # steps

Runs = Mapping[tuple[float, str], Mapping[int, Rows]]
"""(lambda, variant) -> seed -> metrics."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", default="1,2,3", metavar="A,B", help="run.seed of the runs (default: 1,2,3)")
    parser.add_argument("--folder", type=Path, help="where the runs are kept (default: a temporary folder)")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    with tempfile.TemporaryDirectory(prefix="right-shift") as temporary:
        folder = (args.folder or Path(temporary)).absolute()
        kinds = [(lam, variant) for lam in LAMBDAS for variant in VARIANTS]
        runs = {kind: {seed: read_rows(train(folder, *kind, seed)) for seed in seeds} for kind in kinds}
    print("\n".join(table_lines(runs)))
    draw(runs)
    print(f"wrote {OUTPUT.relative_to(ROOT)}")


# -------------------------------------------------------------------------------------------------------------------- runs


def train_without_shift(arguments: Sequence[str]) -> int:
    """Run one rank of `megappo ARGUMENTS` whose critic's outputs stay where they are."""
    from megappo.commands import cli
    from megappo.trainer import roles

    roles.align_values = unshifted
    return cli.main(arguments)


def train(folder: Path, lam: float, variant: str, seed: int) -> Path:
    """Train the quickstart on two CPU ranks, unless the run is there; returns its directory."""
    run_dir = folder / f"lambda-{lam}-{variant}-{seed}"
    if run_dir.exists() and read_run(run_dir).state == "finished":
        return run_dir
    files = task(folder)
    places = {
        "run.output_dir": folder,
        "run.name": run_dir.name,
        "policy.model": files / "sft" / "export",
        "data.train": files / "data" / "train.jsonl",
        "data.eval": files / "data" / "eval.jsonl",
        "data.tokenizer": files / "model" / "tokenizer.model",
    }
    overrides = [f"{key}={value}" for key, value in places.items()]
    command = ["train", str(ROOT / "configs" / "quickstart.yaml"), *overrides, f"run.seed={seed}", f"algorithm.lam={lam}", *LEAN]
    if code := start_ranks(NUM_RANKS, command, VARIANTS[variant]):
        raise SystemExit(f"{run_dir} ended with exit code {code}")
    return run_dir


def task(folder: Path) -> Path:
    """Make the quickstart's model, tokenizer and data, and warm the model up, unless they are there; returns their folder."""
    files = folder / "task"
    if not (files / "sft" / "export").exists():
        run = [sys.executable, str(ROOT / "scripts" / "quickstart_model.py"), str(files)]
        subprocess.run(run, check=True)
        places = {
            "run.output_dir": files,
            "policy.model": files / "model",
            "data.train": files / "data" / "sft.jsonl",
            "data.tokenizer": files / "model" / "tokenizer.model",
        }
        overrides = [f"{key}={value}" for key, value in places.items()]
        run = [sys.executable, "-m", "megappo", "sft", str(ROOT / "configs" / "quickstart_sft.yaml"), *overrides]
        subprocess.run(run, check=True, cwd=ROOT)
    return files


# ------------------------------------------------------------------------------------------------------------------ results


def table_lines(runs: Runs) -> list[str]:
    """Markdown: a row for each run, with means of WINDOW steps."""
    windows = [(last - WINDOW + 1, last) for last in range(WINDOW, STEPS + 1, WINDOW)]
    head = ["lambda", "shift", "seed", *(f"reward {first}-{last}" for first, last in windows), f"first step at {GOAL}", "held-out"]
    head += [f"explained variance {first}-{last}" for first, last in (windows[0], windows[-1])]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for (lam, variant), of_seed in runs.items():
        for seed, rows in of_seed.items():
            rewards, explained = curve_of(rows, REWARD), curve_of(rows, EXPLAINED)
            reached = next((str(step) for step, reward in rewards.items() if reward is not None and reward >= GOAL), "never")
            cells = [f"{lam:g}", variant, str(seed), *(f"{mean_of(rewards, *window):.3f}" for window in windows), reached]
            cells += [f"{rows[STEPS][Metric.EVAL_SCORE.value]:.3f}"]
            cells += [f"{mean_of(explained, *window):.3f}" for window in (windows[0], windows[-1])]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def mean_of(curve: Curve, first: int, last: int) -> float:
    """Mean of the values of these steps, both included; NaN if one of them was not finite."""
    return mean([curve[step] for step in range(first, last + 1)])


def draw(runs: Runs) -> None:
    """Draw a row for each lambda: reward and explained variance."""
    rows = [
        [
            Panel(
                f"{metric}, lambda {lam:g}",
                {f"{variant} the shift": [curve_of(rows, metric) for rows in runs[lam, variant].values()] for variant in VARIANTS},
            )
            for metric in (REWARD, EXPLAINED)
        ]
        for lam in LAMBDAS
    ]
    draw_bands(rows, OUTPUT)


if __name__ == "__main__":
    sys.exit(train_without_shift(sys.argv[1:]) if is_rank() else main())
