"""Time PPO steps with generation beside training, by `rollout.max_staleness`: `python benchmarks/bench_asynchronous.py`.

Two ranks on two cores, a random llama and vLLM. A response of random weights ends at each token with the same chance, so lengths
have a tail: the longest of a step is several times the mean. `megappo train` runs the same steps with all roles and vLLM on both
ranks, which take turns; with training on one rank and vLLM on the other, which take turns too; and so with each max_staleness. The
median step counts, the first ones left out. Beside each stands what `megappo tune` predicts from the parts of the second run
(`commands/tune/generation.Overlap`).

Two cores are no two devices: beside the other, each half is slower than alone. `--paces 0.01 0.5` makes an engine step take at
least 10 ms and a step's training half a second more, asleep, which shows what the halves do to each other's waits alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.experiments.arms import APART
from benchmarks.harness.model import Mistake, Parser
from benchmarks.harness.paces import HOOK
from benchmarks.harness.small_model import train, write_small_model
from megappo.commands.tune.generation import Overlap
from megappo.telemetry.metrics import Metric
from megappo.telemetry.tables import table
from scripts.arithmetic import ArithmeticTask, train_tokenizer, write_arithmetic

LEFT_OUT = 3  # steps of a run that do not count: a pipeline fills in max_staleness + 1 steps
LONGEST = 200


@dataclass(frozen=True)
class Timed:
    """Medians of a run's steps. ages: of the tokens, (mean, largest)."""

    step_s: float
    generate_s: float
    waited_s: float
    idle_s: float
    ages: tuple[float, float]
    cut: float
    lengths: tuple[float, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 if a run fails, 2 for wrong arguments."""
    parser = Parser(prog="bench_asynchronous", description="Steps with generation beside training, by max_staleness.")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4], metavar="K", help="(default: 0 1 2 4)")
    parser.add_argument("--samples", type=int, default=24, help="responses of a step (default: 24)")
    parser.add_argument(
        "--epochs", type=int, default=1, help="of policy and critic in a step: how long training takes (default: 1)"
    )
    parser.add_argument(
        "--paces",
        type=float,
        nargs=2,
        default=[0.0, 0.0],
        metavar=("ENGINE_STEP_S", "TRAINING_S"),
        help="least seconds of an engine step, and further ones of a step's training (default: 0 0)",
    )
    parser.add_argument("--steps", type=int, default=16, help=f"of each run, {LEFT_OUT} of them not counted (default: 16)")
    try:
        args = parser.parse_args(argv)
        if min(args.samples, args.epochs, args.steps - max(LEFT_OUT, *args.staleness)) < 1 or min(*args.paces, *args.staleness) < 0:
            at_least_0 = "--staleness and --paces at least 0"
            raise Mistake(f"--samples and --epochs are at least 1, {at_least_0}, --steps above {LEFT_OUT} and every K")
    except Mistake as error:
        print(f"bench_asynchronous: {error}", file=sys.stderr)
        return 2
    os.environ["MEGAPPO_PACES"] = "{} {}".format(*args.paces)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        found: dict[str, Timed] = {}
        for way, keys in ways(args.staleness).items():
            failure = train(folder, name_of(way), configuration(folder, args, keys), HOOK)
            if failure is not None:
                print(f"bench_asynchronous: the run {way!r} failed:\n{failure}", file=sys.stderr)
                return 1
            found[way] = timed(folder / "runs" / name_of(way) / "metrics.jsonl")
    print(report(found))
    return 0


def ways(staleness: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return way -> keys of its run."""
    taking_turns = {"colocated": {}, "apart, in turns": APART}
    return taking_turns | {f"max_staleness {k}": {**APART, "rollout.max_staleness": k} for k in staleness}


def write_inputs(folder: Path) -> None:
    """model/ and data/."""
    write_small_model(folder / "model", vocab_size=32, num_layers=4)
    train_tokenizer(folder / "model")
    write_arithmetic(folder / "data", num_train=400, num_eval=1, num_sft=1, seed=0, task=ArithmeticTask(0, 99, "+"))


def configuration(folder: Path, args: argparse.Namespace, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Of the run of a way."""
    config: dict[str, Any] = {
        "run": {"output_dir": str(folder / "runs"), "num_ranks": 2, "device": "cpu"},
        "policy": {"model": str(folder / "model"), "dtype": "fp32", "optimizer": {"lr": 1e-9}},
        "critic": {"dtype": "fp32"},
        "reference": {"dtype": "fp32"},
        "rollout": {"max_response_tokens": LONGEST, "kv_cache_gib": 0.1},
        "data": {
            "train": str(folder / "data" / "train.jsonl"),
            "tokenizer": str(folder / "model" / "tokenizer.model"),
            "chat_template": False,
            "max_prompt_tokens": 16,
            "prompts_per_step": args.samples,
        },
        "reward": {"parts": [{"name": "has_eos"}]},
        "algorithm": {"mini_batch_size": args.samples, "ppo_epochs": args.epochs, "importance_sampling": {"type": "tis"}},
        "trainer": {"steps": args.steps},
        "checkpoint": {"save_every": "never", "export_at_end": False},
        "telemetry": {"trajectories_every": 0},
    }
    for key, value in keys.items():
        section, name = key.split(".")
        config[section][name] = value
    return config


def name_of(way: str) -> str:
    return way.replace(", ", "-").replace(" ", "-")


def timed(metrics: Path) -> Timed:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if Metric.STEP_SECONDS.value in row][LEFT_OUT:]

    def median(name: str) -> float:
        return statistics.median(row.get(name, 0.0) for row in steps)

    return Timed(
        median(Metric.STEP_SECONDS.value),
        median(Metric.STAGE_SECONDS.of("generate_s")),
        median(Metric.WAITED.value),
        median(Metric.ROLLOUT_IDLE.value),
        (median(Metric.TOKEN_AGE_MEAN.value), max(row.get(Metric.TOKEN_AGE_MAX.value, 0.0) for row in steps)),
        median(Metric.REQUESTS_CUT.value),
        (median(Metric.RESPONSE_MEAN.value), median(Metric.RESPONSE_MAX.value)),
    )


def report(found: Mapping[str, Timed]) -> str:
    """Format a row for each way. The prediction is from the second: what trains, what samples, and how long the longest takes."""
    apart = found["apart, in turns"]
    training_s = apart.step_s - apart.generate_s
    # The longest response lasts the whole generation, and others beside it do not hold it up: the work is the mean's share of that.
    mean, longest = apart.lengths
    overlap = Overlap(training_s, apart.generate_s * mean / longest, apart.generate_s)
    rows = []
    for way, one in found.items():
        asynchronous = way.startswith("max_staleness")
        predicted = f"{overlap.step_s(int(way.split()[1])):.2f}" if asynchronous else ""
        waits = [f"{one.waited_s / one.step_s:.0%}", f"{one.idle_s / one.step_s:.0%}"] if asynchronous else ["", ""]
        ages = [f"{one.ages[0]:.2f}", f"{one.ages[1]:.0f}", f"{one.cut:.0f}"] if asynchronous else ["", "", ""]
        rows.append([way, f"{one.step_s:.2f}", f"{apart.step_s / one.step_s:.2f}", predicted, *waits, *ages])
    columns = ["", "step s", "gain", "predicted s", "training waits", "sampler idles", "age mean", "oldest", "cut"]
    what = (
        f"responses of {mean:.0f} tokens in the mean, {longest:.0f} the longest; taking turns: {training_s:.2f} s training and push"
    )
    return "\n".join([f"{what}, {apart.generate_s:.2f} s generation", *table(columns, rows, left=1)])


if __name__ == "__main__":
    sys.exit(main())
