"""Benchmark whole PPO steps under each implementation of the ops: `python benchmarks/bench_step.py runs/quickstart [--kernels
...]`.

The folder is the output of `scripts/quickstart.sh`: the warmed-up policy, the data and the tokenizer. Runs of a few steps alternate
between the implementations, there and back, so that a drift of the machine affects all; the first steps of each are left out.
Prints the median step and its stages. A step includes generation and the models' forwards and backwards, so the ops' own gains are
small in it; the bar is that a step is not slower than with the references.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness.clock import summary
from benchmarks.harness.model import Mistake, Parser
from megappo.ops.implementations import Kernels
from megappo.telemetry.metrics import Metric

LEFT_OUT = 3
# Allowed slowdown against the references: the medians of equal runs differ by as much.
NOISE = 0.02
STEP = Metric.STEP_SECONDS.value
Samples = dict[str, list[float]]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 if a run failed, 2 for wrong arguments."""
    parser = Parser(prog="bench_step", description="Whole PPO steps under each implementation of the ops.")
    parser.add_argument("folder", type=Path, help="what scripts/quickstart.sh wrote")
    parser.add_argument("--kernels", default="reference,auto", help="implementations to compare, comma-separated")
    parser.add_argument("--steps", type=int, default=16, help=f"steps of a run, of which the first {LEFT_OUT} do not count")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each implementation")
    parser.add_argument("--json", type=Path, help="file for the samples")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of configs/quickstart.yaml, for example run.device=cuda")
    try:
        args = parser.parse_intermixed_args(argv)
        kernels = _checked(args)
    except Mistake as error:
        print(f"bench_step: {error}", file=sys.stderr)
        return 2
    samples: dict[str, Samples] = {name: {} for name in kernels}
    for turn in range(args.rounds):
        for name in kernels if turn % 2 == 0 else kernels[::-1]:
            if not _run(args.folder, name, args.steps, args.overrides, samples[name]):
                return 1
    print(report(samples))
    if args.json:
        args.json.write_text(json.dumps(samples, indent=1) + "\n", encoding="utf-8")
    return 0


def _checked(args: argparse.Namespace) -> list[str]:
    kernels = args.kernels.split(",")
    for name in kernels:
        if name not in get_args(Kernels):
            raise Mistake(f"--kernels {name}: use {', '.join(get_args(Kernels))}")
    if not (args.folder / "sft/export").is_dir():
        raise Mistake(f"{args.folder} has no sft/export: run scripts/quickstart.sh first and name the folder it wrote")
    if args.steps <= LEFT_OUT:
        raise Mistake(f"--steps {args.steps}: more than the {LEFT_OUT} that do not count")
    if args.rounds < 1:
        raise Mistake(f"--rounds {args.rounds}: at least 1")
    return kernels


def _run(folder: Path, kernels: str, steps: int, overrides: Sequence[str], samples: Samples) -> bool:
    """Add the seconds of every counted step to `samples`; prints the end of the output and returns False if the run failed."""
    with tempfile.TemporaryDirectory() as output:
        command = [*_command(folder, Path(output), kernels, steps), *overrides]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            print(f"bench_step: kernels={kernels} failed:\n{(done.stdout + done.stderr)[-2000:]}", file=sys.stderr)
            return False
        rows = [json.loads(line) for line in (Path(output) / "ppo/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in [row for row in rows if row.get(STEP) is not None][LEFT_OUT:]:
        for name, value in row.items():
            if name.startswith("timing/") and value is not None:
                samples.setdefault(name, []).append(value)
    return True


def _command(folder: Path, output: Path, kernels: str, steps: int) -> list[str]:
    folder = folder.resolve()
    return [
        sys.executable,
        "-m",
        "megappo.commands.cli",
        "train",
        "configs/quickstart.yaml",
        f"kernels={kernels}",
        f"run.output_dir={output}",
        f"policy.model={folder}/sft/export",
        f"data.train={folder}/data/train.jsonl",
        f"data.eval={folder}/data/eval.jsonl",
        f"data.tokenizer={folder}/model/tokenizer.model",
        f"trainer.steps={steps}",
        f"trainer.eval_every={steps}",
    ]


def report(samples: dict[str, Samples]) -> str:
    """Format a line per timing with its median under each implementation, and the bar if the references were measured."""
    kernels = list(samples)
    names = [name for name in samples[kernels[0]] if all(name in samples[other] for other in kernels)]
    lines = [f"{'median over steps, s':34}" + "".join(f"{name:>18}" for name in kernels)]
    for name in sorted(names, key=lambda name: (name != STEP, name)):
        found = [summary(samples[other][name]) for other in kernels]
        lines.append(f"{name:34}" + "".join(f"{t.median:>10.3f} +-{t.spread / 2:5.3f}" for t in found))
    if "reference" in kernels:
        reference = summary(samples["reference"][STEP]).median
        for other in (name for name in kernels if name != "reference"):
            ratio = summary(samples[other][STEP]).median / reference
            verdict = "met" if ratio <= 1 + NOISE else "not met"
            lines.append(f"bar: a step with kernels={other} is not slower than with reference: {ratio:.3f}x: {verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
