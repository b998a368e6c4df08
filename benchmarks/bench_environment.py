"""Time whole PPO steps whose turns a slow environment answers, inline and beside generation: `python
benchmarks/bench_environment.py`.

One rank, a random llama, vLLM (or the policy's own shards). The environment sleeps before it answers, as one that asks a server
does, for a time that depends on the trajectory and the turn alone. `megappo train` runs the same steps with every way of answering:
by the rank itself, by `workers` of it whose answered trajectories go on together, and each as soon as it is answered. The fastest
step of each counts, the first left out: what disturbs a step makes it slower, never faster. Turns and scores of the first step are
compared, so that no way is faster for having done less. Prints the table of docs/environments.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness.model import Mistake, Parser
from benchmarks.harness.small_model import train, write_small_model
from megappo.telemetry.metrics import Metric
from megappo.telemetry.tables import table
from scripts.arithmetic import ArithmeticTask, train_tokenizer, write_arithmetic

LEFT_OUT = 1  # steps of a run that do not count
OBSERVE = '''
import time

def observe(turn, seconds):
    """Half to one and a half times `seconds`, by the trajectory and the turn."""
    time.sleep(seconds * (0.5 + ((turn.seed + turn.index * 7919) % 1009) / 1009))
    return "+1="
'''
WAYS: Mapping[str, Mapping[str, Any]] = {
    "inline": {},
    "workers, together": {"join": "together"},
    "workers, each": {"join": "each"},
}


@dataclass(frozen=True)
class Timed:
    """The fastest step of a way. answers_s: of all answers of that step. first: figures of the first step, for the comparison."""

    step_s: float
    generate_s: float
    answers_s: float
    first: tuple[float, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 if a run fails or the ways differ, 2 for wrong arguments."""
    parser = Parser(prog="bench_environment", description="Steps with a slow environment, answered inline and beside generation.")
    parser.add_argument("--seconds", type=float, default=0.1, help="mean of an answer (default: 0.1)")
    parser.add_argument("--workers", type=int, default=8, help="(default: 8)")
    parser.add_argument("--samples", type=int, default=32, help="trajectories of a step (default: 32)")
    parser.add_argument("--turns", type=int, default=3, help="of a trajectory (default: 3)")
    parser.add_argument("--steps", type=int, default=4, help="of each way, the first not counted (default: 4)")
    parser.add_argument("--engine", choices=("vllm", "megatron"), default="vllm")
    try:
        args = parser.parse_args(argv)
        if not 0 < args.seconds < 60 or min(args.workers, args.samples, args.turns - 1, args.steps - LEFT_OUT) < 1:
            raise Mistake("--seconds is above 0 and below 60, --workers and --samples at least 1, --turns and --steps at least 2")
    except Mistake as error:
        print(f"bench_environment: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        found: dict[str, Timed] = {}
        for way, keys in WAYS.items():
            text = train(Path(folder), name_of(way), configuration(Path(folder), args, keys))
            if text is not None:
                print(f"bench_environment: the run {way!r} failed:\n{text}", file=sys.stderr)
                return 1
            found[way] = timed(Path(folder) / "runs" / name_of(way))
    what = f"{args.samples} trajectories of up to {args.turns} turns, answers of {args.seconds:g} s, {args.workers} workers"
    print(f"{what}, {args.engine}; fastest of {args.steps - LEFT_OUT} steps\n{report(found)}")
    if len({one.first for one in found.values()}) > 1:
        print("bench_environment: the ways drew other trajectories in the first step", file=sys.stderr)
        return 1
    return 0


def write_inputs(folder: Path) -> None:
    """model/, data/ and slow.py."""
    write_small_model(folder / "model", vocab_size=32, num_layers=4)
    train_tokenizer(folder / "model")
    write_arithmetic(folder / "data", num_train=200, num_eval=1, num_sft=1, seed=0, task=ArithmeticTask(0, 99, "+"))
    (folder / "slow.py").write_text(OBSERVE)


def configuration(folder: Path, args: argparse.Namespace, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Of the run of a way; keys: of its environment besides."""
    environment = {
        "path": str(folder / "slow.py"),
        "function": "observe",
        "args": {"seconds": args.seconds},
        "max_turns": args.turns,
        "turn_tokens": 24,
        **({"workers": args.workers, **keys} if keys else {}),
    }
    return {
        "run": {"output_dir": str(folder / "runs"), "num_ranks": 1, "device": "cpu"},
        "policy": {"model": str(folder / "model"), "dtype": "fp32"},
        "critic": {"dtype": "fp32"},
        "reference": {"dtype": "fp32"},
        "rollout": {
            "engine": args.engine,
            "samples_per_prompt": 1,
            "max_response_tokens": 32 * args.turns,
            "environment": environment,
        },
        "data": {
            "train": str(folder / "data" / "train.jsonl"),
            "tokenizer": str(folder / "model" / "tokenizer.model"),
            "chat_template": False,
            "max_prompt_tokens": 16,
            "prompts_per_step": args.samples,
        },
        "reward": {"parts": [{"name": "has_eos"}]},
        "algorithm": {"mini_batch_size": args.samples},
        "trainer": {"steps": args.steps},
        "checkpoint": {"save_every": "never", "export_at_end": False},
        "telemetry": {"trajectories_every": 0},
    }


def name_of(way: str) -> str:
    return way.replace(", ", "-")


def timed(run: Path) -> Timed:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if Metric.STEP_SECONDS.value in row]
    best = min(steps[LEFT_OUT:], key=lambda row: row[Metric.STEP_SECONDS.value])
    return Timed(
        best[Metric.STEP_SECONDS.value],
        best[Metric.STAGE_SECONDS.of("generate_s")],
        best[Metric.ENVIRONMENT_SECONDS.value],
        (steps[0][Metric.TURNS_MEAN.value], steps[0][Metric.SCORE_MEAN.value]),
    )


def report(found: Mapping[str, Timed]) -> str:
    """Format a row for each way, the first being what the others are compared with."""
    inline = next(iter(found.values()))
    rows = [
        [
            way,
            f"{one.step_s:.2f}",
            f"{one.generate_s:.2f}",
            f"{one.answers_s:.2f}",
            f"{inline.generate_s / one.generate_s:.1f} x",
            f"{inline.step_s / one.step_s:.1f} x",
        ]
        for way, one in found.items()
    ]
    return "\n".join(table(["turns are answered", "step s", "generate s", "answers s", "generate", "step"], rows, left=1))


if __name__ == "__main__":
    sys.exit(main())
