"""Time whole PPO steps of a small model in several placements beside the tuner's prediction: `python
benchmarks/bench_placements.py`.

Two ranks of this machine, a random llama of 8 layers, vLLM. Each placement is trained for some steps by `megappo train`, in rounds,
and the fastest step of all counts, as in the tuner's trials: what disturbs a step makes it slower, never faster. Beside it are two
predictions: that of the model alone, with the rates that `benchmarks/probe.py` finds here, and that with the passes and updates of
each role tried alone, which leaves to the model how roles share the clock, generation and the push. Trials count processor time, as
if nothing else ran here. Prints the table that docs/layouts.md sums up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness.model import Mistake, Parser
from benchmarks.harness.processor_trials import measure
from benchmarks.harness.small_model import write_small_model
from benchmarks.probe import dump_hardware, probe
from megappo.commands.tune.candidates import Choice, Machine
from megappo.commands.tune.cost import workload_of
from megappo.commands.tune.measure import phases_of, trial_of
from megappo.commands.tune.placing import stage_seconds
from megappo.commands.tune.search import Search
from megappo.config.loading import load_config
from megappo.telemetry.hardware import Hardware
from megappo.telemetry.metrics import Metric
from megappo.telemetry.tables import figures, table
from megappo.trainer.prepare.layouts import read_archs
from scripts.arithmetic import ArithmeticTask, train_tokenizer, write_arithmetic

RANKS = 2
LEFT_OUT = 2  # steps of a run that do not count
PLACEMENTS: Mapping[str, Sequence[str]] = {
    "colocated": (),
    "critic apart": ("policy.ranks=0", "reference.ranks=0", "critic.ranks=1"),
    "critic apart, rollout beside the policy": ("policy.ranks=0", "reference.ranks=0", "critic.ranks=1", "rollout.ranks=0"),
    "rollout apart": ("policy.ranks=0", "reference.ranks=0", "critic.ranks=0", "rollout.ranks=1"),
}
SAMPLES, PROMPT, RESPONSE = 32, 12, 96


@dataclass(frozen=True)
class Stages:
    """Seconds of a step's stages. passes, updates: of all roles, by the clock."""

    generate: float
    passes: float
    updates: float
    push: float

    @property
    def together(self) -> float:
        return self.generate + self.passes + self.updates + self.push


@dataclass(frozen=True)
class Timed:
    """A placement. by_trials: predicted from the processor times of single roles. whole_s: the measured step, with other stages
    too."""

    measured: Stages
    predicted: Stages
    by_trials: Stages
    whole_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 if a run failed, 2 for wrong arguments."""
    parser = Parser(prog="bench_placements", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help=f"steps of a run, of which the first {LEFT_OUT} do not count")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each placement")
    parser.add_argument("--only", nargs="+", choices=list(PLACEMENTS), default=list(PLACEMENTS), metavar="PLACEMENT")
    try:
        args = parser.parse_args(argv)
        if args.steps <= LEFT_OUT:
            raise Mistake(f"--steps {args.steps}: more than the {LEFT_OUT} that do not count")
        if args.rounds < 1:
            raise Mistake(f"--rounds {args.rounds}: at least 1")
    except Mistake as error:
        print(f"bench_placements: {error}", file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_run(folder)
        before = os.getloadavg()[0]
        hardware = probe()
        print(dump_hardware(hardware), flush=True)
        steps: dict[str, list[Mapping[str, float]]] = {placement: [] for placement in args.only}
        for turn in range(args.rounds):
            for placement in args.only:
                found = _train(config, folder / f"{turn}-{placement.replace(' ', '-')}", PLACEMENTS[placement], args.steps)
                if found is None:
                    return 1
                steps[placement] += found
        timed = {placement: _timed(config, PLACEMENTS[placement], rows, hardware) for placement, rows in steps.items()}
        load = f"{os.cpu_count()} cores, load {before:.1f} before and {os.getloadavg()[0]:.1f} after"
        print(f"\n{RANKS} ranks, fastest of {args.rounds * (args.steps - LEFT_OUT)} steps of {SAMPLES} samples; {load}\n")
        print(report(timed))
    return 0


def write_run(folder: Path) -> Path:
    """Model, data and configuration; returns the path of the last."""
    # So many ids that hardly any response draws the end of sequence: lengths are those of the prediction.
    write_small_model(folder / "model", vocab_size=2048, num_layers=8)
    tokenizer = train_tokenizer(folder / "model")
    files = write_arithmetic(folder / "data", 400, 20, 20, 0, ArithmeticTask(lowest=0, highest=999, padded=True))
    path = folder / "run.yaml"
    run = {
        "run": {"num_ranks": RANKS, "device": "cpu", "output_dir": str(folder / "runs")},
        "policy": {"model": str(folder / "model"), "dtype": "fp32", "micro_batch_tokens": 512},
        "critic": {"dtype": "fp32", "micro_batch_tokens": 512},
        "reference": {"dtype": "fp32", "micro_batch_tokens": 512},
        "rollout": {"engine": "vllm", "max_response_tokens": RESPONSE, "kv_cache_gib": 0.25, "samples_per_prompt": 1},
        "data": {
            "train": str(files.train),
            "tokenizer": str(tokenizer),
            "chat_template": False,
            "max_prompt_tokens": PROMPT,
            "prompts_per_step": SAMPLES,
        },
        "reward": {"parts": [{"name": "exact_match"}]},
        "algorithm": {"mini_batch_size": SAMPLES // 2},
        "checkpoint": {"save_every": 0},
    }
    path.write_text(json.dumps(run), encoding="utf-8")  # which is YAML too
    return path


def _train(config: Path, output: Path, placement: Sequence[str], steps: int) -> list[Mapping[str, float]] | None:
    """Metrics of the steps that count; None, after the end of the output, if the run failed."""
    keys = [f"run.output_dir={output}", "run.name=ppo", f"trainer.steps={steps}", *placement]
    command = [sys.executable, "-m", "megappo.commands.cli", "train", str(config), *keys]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"bench_placements: {' '.join(placement)} failed:\n{(done.stdout + done.stderr)[-2000:]}", file=sys.stderr)
        return None
    rows = [json.loads(line) for line in (output / "ppo" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row.get(Metric.STEP_SECONDS.value) is not None][LEFT_OUT:]


def _timed(config: Path, placement: Sequence[str], rows: Sequence[Mapping[str, float]], hardware: Hardware) -> Timed:
    row = min(rows, key=lambda one: one[Metric.STEP_SECONDS.value])
    seconds = {name: row[Metric.STAGE_SECONDS.of(f"{name}_s")] for name in ("generate", "logprobs", "push_weights")}
    updates = [row[Metric.STAGE_SECONDS.of(f"update_{role}_s")] for role in ("critic", "policy")]
    given = load_config(str(config), [f"run.num_ranks={RANKS}", *placement])
    prompt, response = (row[metric.value] for metric in (Metric.PROMPT_MEAN, Metric.RESPONSE_MEAN))
    search = Search(given, read_archs(given), Machine(RANKS, hardware), workload_of(given, prompt, response), ())
    choice = search.best()
    assert choice is not None, "a CPU has room"
    together = sum(updates) if search.placements["critic"].overlaps(search.placements["policy"]) else max(updates)
    measured = Stages(seconds["generate"], seconds["logprobs"], together, seconds["push_weights"])
    return Timed(measured, _of_choice(choice), _of_choice(_by_trials(search, choice)), row[Metric.STEP_SECONDS.value])


def _of_choice(choice: Choice) -> Stages:
    return Stages(choice.generate_s, *stage_seconds(choice), choice.push_s)


def _by_trials(search: Search, choice: Choice) -> Choice:
    """The choice with passes and updates of its roles as trials find them."""
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), {role: trial_of(search, one) for role, one in choice.roles.items()}, RANKS)
    phases = {role: phases_of(one, role, search.workload) for role, one in found.items()}
    roles = {role: replace(one, cost=replace(one.cost, phases=phases[role])) for role, one in choice.roles.items()}
    return replace(choice, roles=roles)


def report(timed: Mapping[str, Timed]) -> str:
    """A line for each placement and origin of its seconds."""
    rows = []
    for placement, one in timed.items():
        for origin, stages in (("measured", one.measured), ("predicted", one.predicted), ("from trials", one.by_trials)):
            seconds = (stages.generate, stages.passes, stages.updates, stages.push, stages.together)
            ratio = "" if origin == "measured" else f"{one.measured.together / stages.together:.2f}"
            whole = figures(one.whole_s) if origin == "measured" else ""
            rows.append([placement if origin == "measured" else "", origin, *map(figures, seconds), ratio, whole])
    header = ["placement", "seconds", "generate", "passes", "updates", "push", "together", "ratio", "whole step"]
    return "\n".join(table(header, rows, left=2))


if __name__ == "__main__":
    sys.exit(main())
