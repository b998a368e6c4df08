"""A PPO step of a random model by stage: seconds, FLOP/s, MFU, memory beside the plan's, and in a traced step the launches and the
share of the time in which the device works: whether CUDA graphs or fewer launches would matter.

    python -m scripts.gpu_run.step FOLDER PAGE [KEY=VALUE ...]      FOLDER: of scripts.gpu_run.random_model; PAGE: Markdown to write

Plans and trains with configs/quickstart.yaml and the overrides. The step before the last counts, which is traced: the first one
compiles.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.trainer.instruments import STAGE_RANGE

ROOT = Path(__file__).resolve().parents[2]
# Stage of the trainer -> phases of the plan in it.
STAGES: Mapping[str, tuple[str, ...]] = {
    "generate": ("generate",),
    "logprobs": ("log-probs", "values", "reference log-probs"),
    "advantages": (),
    "update_critic": ("critic update", "critic optimizer step"),
    "update_policy": ("policy update", "policy optimizer step"),
    "push_weights": ("push weights",),
}


def planned(said: str) -> dict[str, float]:
    """Phase -> GiB in all, from the table of phases that `megappo plan` prints."""
    table = re.search(r"memory of rank \d+ by phase \((GiB|MiB)\)\n.*\n((?:  .*\n)+)", said)
    if table is None:
        return {}
    unit = 1.0 if table[1] == "GiB" else 1 / 1024
    rows = re.findall(r"^  (\S.*?)  +[\d.,]+ +[\d.,]+ +([\d.,]+)", table[2], re.MULTILINE)
    return {phase: float(number.replace(",", "")) * unit for phase, number in rows}


ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
Span = tuple[float, float]


def launched(events: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, float]]:
    """Stage -> (launches, share of its time in which the device worked for it), of the events of a Chrome trace. What a stage
    launched counts for it whenever the device came to it; stages in which nothing was launched are left out."""
    whole = [event for event in events if event.get("ph") == "X"]
    begins = {event["args"]["correlation"]: event["ts"] for event in whole if "Launch" in event["name"] and _correlated(event)}
    work = [event for event in whole if event.get("cat") in ON_DEVICE and event["args"].get("correlation") in begins]
    found = {}
    for stage in STAGES:
        named = [event for event in whole if event["name"] == STAGE_RANGE.format(stage) and event.get("cat") == "user_annotation"]
        spans = [(event["ts"], event["ts"] + event["dur"]) for event in named]
        launches = sum(begin <= at < end for at in begins.values() for begin, end in spans)
        mine = [one for one in work if any(begin <= begins[one["args"]["correlation"]] < end for begin, end in spans)]
        if launches:
            busy = _length([(one["ts"], one["ts"] + one["dur"]) for one in mine])
            found[stage] = launches, busy / sum(end - begin for begin, end in spans)
    return found


def _correlated(event: Mapping[str, Any]) -> bool:
    return event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})


def _length(spans: Sequence[Span]) -> float:
    """Time that the spans cover together."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def page(row: Mapping[str, float | None], plan: Mapping[str, float], traced: Mapping[str, tuple[int, float]]) -> str:
    """Table of a step's stages. row: of metrics.jsonl. plan: see `planned`. traced: see `launched`."""
    lines = ["| stage | seconds | TFLOP/s | MFU | peak, GiB | planned, GiB | launches | device at work |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for stage, phases in STAGES.items():
        cells = [row.get(f"timing/{stage}_s"), row.get(f"perf/tflops/{stage}"), row.get(f"perf/mfu/{stage}")]
        peak = max((plan[phase] for phase in phases if phase in plan), default=None)
        cells += [row.get(f"memory/{stage}_peak_gib"), peak]
        launches, share = traced.get(stage, (None, None))
        more = ["-" if launches is None else f"{launches}", "-" if share is None else f"{share:.0%}"]
        lines.append(f"| {stage} | " + " | ".join(["-" if cell is None else f"{cell:.3g}" for cell in cells] + more) + " |")
    whole = [row.get("timing/step_s"), row.get("perf/tflops/step"), row.get("perf/mfu/step")]
    lines.append("| *step* | " + " | ".join("-" if cell is None else f"{cell:.3g}" for cell in whole) + " | | | | |")
    return "\n".join(lines) + "\n"


def main(folder: Path, target: Path, overrides: Sequence[str]) -> int:
    files = [
        f"policy.model={folder / 'model'}",
        f"data.train={folder / 'data/train.jsonl'}",
        f"data.tokenizer={folder / 'model/tokenizer.model'}",
        f"run.output_dir={folder / 'runs'}",
    ]

    def megappo(command: str) -> str:
        words = [sys.executable, "-m", "megappo", command, "configs/quickstart.yaml", *files, *overrides]
        done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        if done.returncode:
            sys.exit(done.returncode)
        return done.stdout

    plan = planned(megappo("plan"))
    megappo("train")
    rows = [json.loads(line) for line in (folder / "runs/ppo/metrics.jsonl").read_text("utf-8").splitlines()]
    with gzip.open(next((folder / "runs/ppo/profile").glob("*_rank_00000.json.gz")), "rt", encoding="utf-8") as trace:
        traced = launched(json.load(trace)["traceEvents"])
    target.write_text(page([row for row in rows if "timing/step_s" in row][-2], plan, traced), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
