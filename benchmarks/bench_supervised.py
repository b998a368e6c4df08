"""Time fine-tuning and DPO beside TRL's: python benchmarks/bench_supervised.py --trl-python PATH [--rounds 3] [--steps 13]

Both train the same llama of random weights on two data-parallel CPU ranks (gloo, one thread each), in fp32, on the same examples in
the same order, with the same AdamW; the losses of the first steps must agree, or the bar is missed. megappo packs its share of a
batch without padding. TRL pads a batch to its longest example, or joins it (`padding_free`, which its DPO lacks); its DPO computes
the reference in every step, or once before. Runs of all alternate. The first steps of each run are left out.

PATH is the Python of an environment with TRL 1.16 and this one's torch, which is installed first:
    torch=$(python -c 'from megappo.runtime.versions import pinned; print(pinned("torch"))')
    python -m venv /tmp/trl && /tmp/trl/bin/pip install "$torch" && /tmp/trl/bin/pip install trl==1.16.0
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness.step_clock import StepClock
from megappo.runtime.world import is_rank
from megappo.telemetry.tables import table

RANKS = 2
LEFT_OUT = 3  # first steps of a run
COMPARED = 5  # steps whose losses must agree
TOLERANCE = 1e-4
BAR = 1.3
LR = 1e-4
VOCAB_SIZE, NUM_LAYERS = 8192, 4
BATCH = {"sft": 16, "dpo": 8}
"""Kind -> examples of a step, over both ranks."""
DIGITS = (16, 120)
"""Of a prompt, and of a response; uniformly drawn on a logarithmic scale, so most are short."""
MAX_TOKENS = 256  # positions of the model
BOS, EOS, FIRST = 1, 2, 4  # ids of `scripts.arithmetic.train_tokenizer`, whose digits follow FIRST


@dataclass(frozen=True, eq=False)
class Arm:
    """trl: settings of TRL's rank; None: megappo."""

    title: str
    kind: str
    trl: Mapping[str, bool] | None = None


ARMS = (
    Arm("megappo", "sft"),
    Arm("TRL, padded", "sft", {"padding_free": False}),
    Arm("TRL, padding_free", "sft", {"padding_free": True}),
    Arm("megappo", "dpo"),
    Arm("TRL, reference in every step", "dpo", {"precompute": False}),
    Arm("TRL, reference before", "dpo", {"precompute": True}),
)


@dataclass
class Found:
    """Steps of all runs of an arm: seconds on the clock, processor seconds of both ranks together. losses: of the last run."""

    wall_s: list[float]
    processor_s: list[float]
    losses: list[float]
    before_mib: float = 0.0
    peak_mib: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl-python", required=True, metavar="PATH", help="Python of an environment with TRL")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    parser.add_argument("--steps", type=int, default=13, help=f"steps of a run, of which {LEFT_OUT} are left out")
    args = parser.parse_args()
    if args.steps <= max(LEFT_OUT, COMPARED) or args.rounds < 1:
        parser.error(f"--steps {args.steps} --rounds {args.rounds}: more than {max(LEFT_OUT, COMPARED)} steps, and a round")
    found = {arm: Found([], [], []) for arm in ARMS}
    with tempfile.TemporaryDirectory(prefix="supervised-") as name:
        folder = Path(name)
        tokens = write_task(folder, args.steps)
        for turn in range(args.rounds):
            for arm in ARMS if turn % 2 == 0 else ARMS[::-1]:
                run(folder / f"{turn}-{ARMS.index(arm)}", arm, args, found[arm])
    return report(found, tokens)


# -------------------------------------------------------------------------------------------------------------------- task


def write_task(folder: Path, steps: int) -> dict[str, int]:
    """Write model and examples for megappo and for TRL; return the tokens of a step on average, by kind."""
    from benchmarks.harness.small_model import write_small_model
    from scripts.arithmetic import train_tokenizer

    write_small_model(folder / "model", vocab_size=VOCAB_SIZE, num_layers=NUM_LAYERS)
    train_tokenizer(folder / "model")
    draw = random.Random(0)
    texts = [(digits(draw), digits(draw), digits(draw)) for _ in range(steps * max(BATCH.values()))]
    demonstrations = [(BOS, *ids(prompt), *ids(answer), EOS) for prompt, answer, _ in texts]
    masks = [[0] * (1 + len(prompt)) + [1] * (len(answer) + 1) for prompt, answer, _ in texts]
    labels = [[one if kept else -100 for one, kept in zip(tokens, mask)] for tokens, mask in zip(demonstrations, masks)]
    write(folder / "sft.jsonl", [{"ids": tokens, "mask": mask} for tokens, mask in zip(demonstrations, masks)])
    write(folder / "sft.trl.jsonl", [{"input_ids": tokens, "labels": of} for tokens, of in zip(demonstrations, labels)])
    texts = texts[: steps * BATCH["dpo"]]
    write(folder / "dpo.jsonl", [{"prompt": prompt, "chosen": a, "rejected": b} for prompt, a, b in texts])
    pairs = [((BOS, *ids(prompt)), (*ids(a), EOS), (*ids(b), EOS)) for prompt, a, b in texts]
    write(folder / "dpo.trl.jsonl", [{"prompt_ids": p, "chosen_ids": a, "rejected_ids": b} for p, a, b in pairs])
    of_pairs = sum(2 * len(prompt) + len(a) + len(b) for prompt, a, b in pairs)
    return {"sft": sum(map(len, demonstrations)) // steps, "dpo": of_pairs // steps}


def digits(draw: random.Random) -> str:
    low, high = DIGITS
    return "".join(draw.choices("0123456789", k=round(low * (high / low) ** draw.random())))


def ids(text: str) -> list[int]:
    return [FIRST + int(digit) for digit in text]


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def config_of(folder: Path, kind: str, steps: int) -> dict[str, Any]:
    """megappo's configuration of a run, which is named by its kind."""
    keys = {"tokens_key": "ids", "mask_key": "mask"} if kind == "sft" else {"chat_template": False}
    return {
        "kind": kind,
        "run": {"name": "run", "output_dir": str(folder), "num_ranks": RANKS, "device": "cpu"},
        "policy": {"model": str(folder.parent / "model"), "dtype": "fp32", "optimizer": {"lr": LR, "betas": [0.9, 0.95]}},
        "data": {
            "train": str(folder.parent / f"{kind}.jsonl"),
            "tokenizer": str(folder.parent / "model" / "tokenizer.model"),
            "max_tokens": MAX_TOKENS,
            "shuffle": False,
            **keys,
        },
        "trainer": {"steps": steps, "batch_size": BATCH[kind]},
        "checkpoint": {"save_every": "never", "export_at_end": False},
        "telemetry": {"trackers": [], "summary_every": 0},
    }


# -------------------------------------------------------------------------------------------------------------------- runs


def run(folder: Path, arm: Arm, args: argparse.Namespace, found: Found) -> None:
    """Train once in `folder`, and add what was measured."""
    folder.mkdir()
    out, spec = folder / "found", folder / "spec.json"
    if arm.trl is None:
        spec.write_text(json.dumps(config_of(folder, arm.kind, args.steps)), encoding="utf-8")  # which is YAML too
        command = [sys.executable, *LAUNCHER, str(Path(__file__).resolve()), arm.kind, str(spec), str(out)]
    else:
        settings = {
            "model": str(folder.parent / "model"),
            "records": str(folder.parent / f"{arm.kind}.trl.jsonl"),
            "kind": arm.kind,
            "rank_batch": BATCH[arm.kind] // RANKS,
            "steps": args.steps,
            "lr": LR,
            "out": str(out),
            **arm.trl,
        }
        spec.write_text(json.dumps(settings), encoding="utf-8")
        command = [args.trl_python, *LAUNCHER, str(ROOT / "benchmarks" / "harness" / "trl_rank.py"), str(spec)]
    caches = {"HF_HOME": str(folder / "hf"), "MEGAPPO_CACHE": str(folder / "cache")}
    environment = {**os.environ, **caches, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        said = done.stdout + done.stderr
        raise SystemExit(f"{arm.title}, {arm.kind}: exit code {done.returncode}\n{said[-6000:]}")
    of_ranks = [json.loads(Path(f"{out}.{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]
    found.wall_s += of_ranks[0]["wall_s"][LEFT_OUT:]
    found.processor_s += [sum(steps) for steps in zip(*(one["processor_s"] for one in of_ranks))][LEFT_OUT:]
    found.before_mib = max(one["before_kib"] for one in of_ranks) / 1024
    found.peak_mib = max(found.peak_mib, *(one["peak_kib"] / 1024 for one in of_ranks))
    found.losses = losses_of(folder, out, arm)
    step_s, first = statistics.median(of_ranks[0]["wall_s"][LEFT_OUT:]), ", ".join(f"{one:.5f}" for one in found.losses[:COMPARED])
    print(f"{arm.kind}, {arm.title}: {1e3 * step_s:.0f} ms a step; losses {first}", flush=True)


LAUNCHER = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")


def losses_of(folder: Path, out: Path, arm: Arm) -> list[float]:
    if arm.trl is not None:
        return json.loads(Path(f"{out}.losses.json").read_text(encoding="utf-8"))
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row[f"{arm.kind}/loss"] for row in map(json.loads, lines) if f"{arm.kind}/loss" in row]


def train_rank(kind: str, config: str, out: str) -> int:
    """Be one of megappo's ranks."""
    from megappo.commands import cli
    from megappo.trainer.supervised import Supervised

    clock, step = StepClock(), Supervised.step

    def timed(self: Supervised) -> None:
        if self.state.step == 0:
            clock.begin()
        step(self)
        clock.ended()

    setattr(Supervised, "step", timed)
    code = cli.main([kind, config])
    if code == 0:
        clock.write(Path(f"{out}.{os.environ['RANK']}.json"))
    return code


# ------------------------------------------------------------------------------------------------------------------ report


def report(found: Mapping[Arm, Found], tokens: Mapping[str, int]) -> int:
    """Print the table, a line a trainer; return 1 if losses differ or a bar is missed."""
    rows, failed = [], False
    ours = {arm.kind: result for arm, result in found.items() if arm.trl is None}
    for arm, result in found.items():
        own = ours[arm.kind]
        apart = max(abs(a - b) for a, b in zip(result.losses[:COMPARED], own.losses[:COMPARED], strict=True))
        step_s, processor_s = statistics.median(result.wall_s), statistics.median(result.processor_s)
        ratios = [step_s / statistics.median(own.wall_s), processor_s / statistics.median(own.processor_s)]
        failed |= apart > TOLERANCE or (arm.trl is not None and ratios[0] < BAR)
        cells = [f"{1e3 * step_s:.0f}", f"{tokens[arm.kind] / step_s:,.0f}", f"{processor_s:.2f}"]
        memory = [f"{result.peak_mib:.0f}", f"{result.peak_mib - result.before_mib:.0f}"]
        rows.append([arm.kind, arm.title, *cells, *memory, *(f"{ratio:.2f}" for ratio in ratios), f"{apart:.1e}"])
    head = ["", "", "ms/step", "tokens/s", "processor s", "peak MiB", "of it training", "times", "processor", "losses apart"]
    print("\n".join(table(head, rows, left=2)))
    print(f"bar: times >= {BAR}, losses within {TOLERANCE:g} in {COMPARED} steps: {'missed' if failed else 'met'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(train_rank(*sys.argv[1:]) if is_rank() else main())
