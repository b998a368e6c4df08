"""A PPO step of a random model by stage: seconds, FLOP/s, MFU, and memory beside the plan's.

    python -m scripts.gpu_run.step FOLDER PAGE [KEY=VALUE ...]      FOLDER: of scripts.gpu_run.random_model; PAGE: Markdown to write

Plans and trains with configs/quickstart.yaml and the overrides. The last step counts: the first one compiles.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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


def page(row: Mapping[str, float | None], plan: Mapping[str, float]) -> str:
    """Table of a step's stages. row: of metrics.jsonl. plan: see `planned`."""
    lines = ["| stage | seconds | TFLOP/s | MFU | peak, GiB | planned, GiB |", "|---|---:|---:|---:|---:|---:|"]
    for stage, phases in STAGES.items():
        cells = [row.get(f"timing/{stage}_s"), row.get(f"perf/tflops/{stage}"), row.get(f"perf/mfu/{stage}")]
        peak = max((plan[phase] for phase in phases if phase in plan), default=None)
        cells += [row.get(f"memory/{stage}_peak_gib"), peak]
        lines.append(f"| {stage} | " + " | ".join("-" if cell is None else f"{cell:.3g}" for cell in cells) + " |")
    whole = [row.get("timing/step_s"), row.get("perf/tflops/step"), row.get("perf/mfu/step")]
    lines.append("| *step* | " + " | ".join("-" if cell is None else f"{cell:.3g}" for cell in whole) + " | | |")
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
    target.write_text(page([row for row in rows if "timing/step_s" in row][-1], plan), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
