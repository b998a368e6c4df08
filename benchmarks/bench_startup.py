#!/usr/bin/env python
"""Time the answers of `megappo` that need no computation: python benchmarks/bench_startup.py [--repeats N]

Prints a table with the limit beside each figure (the smallest of the repeats); no figure makes it fail. CPU: user and system
seconds of the process, which other programs on the machine disturb less than the time on the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megappo.checkpoint.manifest import Manifest, fingerprint_file, list_files, write_manifest
from megappo.commands.parser import positive_int
from megappo.telemetry.tables import table

RUN, SFT = "configs/quickstart.yaml", "configs/quickstart_sft.yaml"
SCRIPT = "tests/commands/convert/sources/deepseek_7b_gsm8k.sh"
NUM_RUNS = 100
WRONG_KEY, WRONG_VALUE = "policy.paralel.tp=2", "algorithm.gamma=2"
NOT_THERE = ("policy.model=absent", "reward.parts=[{name: exakt}]", "algorithm.mini_batch_size=7")
HELP_S, LISTED_S, REFUSED_S = 0.3, 0.5, 1.5
# arguments, exit code, limit in seconds
CASES: list[tuple[list[str], int, float]] = [
    (["--help"], 0, HELP_S),
    (["train", "--help"], 0, HELP_S),
    (["config", RUN], 0, REFUSED_S),
    (["convert", SCRIPT], 0, LISTED_S),
    *((["train", RUN, wrong], 2, REFUSED_S) for wrong in (WRONG_KEY, WRONG_VALUE)),
    (["sft", SFT, WRONG_KEY], 2, REFUSED_S),
    (["plan", RUN, WRONG_KEY], 2, REFUSED_S),
    (["launch", RUN, "--nodes", "1", "--gpus-per-node", "2", WRONG_KEY], 2, REFUSED_S),
    (["tune", RUN, "--gpu", "h100", WRONG_KEY], 2, REFUSED_S),
    (["verify", RUN, WRONG_KEY], 2, REFUSED_S),
    *((["train", RUN, wrong], 2, REFUSED_S) for wrong in NOT_THERE),
]


def timed(arguments: list[str], code: int) -> tuple[float, float]:
    """Seconds on the clock and of the processor for one call, which must end with this exit code."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(ROOT)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "megappo", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != code:
        raise SystemExit(f"megappo {' '.join(arguments)}: exit code {done.returncode}, expected {code}\n{done.stderr}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def make_runs(folder: Path) -> None:
    """Write what `megappo runs` reads of NUM_RUNS runs: a configuration, 200 steps, a checkpoint of 40 files."""
    line = json.dumps({f"metric/{number}": 0.123456789 for number in range(60)})
    for number in range(NUM_RUNS):
        place = folder / f"run-{number}" / "checkpoints" / "step-200"
        place.mkdir(parents=True)
        for file in range(40):
            (place / f"{file:05d}.safetensors").write_bytes(b"0")
        files = {name: fingerprint_file(place / name) for name in list_files(place)}
        write_manifest(place, Manifest(200, 8, False, {}, files))
        (place.parents[1] / "config.yaml").write_text((ROOT / RUN).read_text())
        (place.parents[1] / "metrics.jsonl").write_text("".join(f'{{"step": {step}, {line[1:]}\n' for step in range(1, 201)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=positive_int, default=3, metavar="N", help="calls of each command (default: 3)")
    repeats = parser.parse_args().repeats
    rows = []
    with tempfile.TemporaryDirectory(prefix="megappo-runs-") as folder:
        make_runs(Path(folder))
        for arguments, code, limit in [*CASES, (["runs", folder], 0, LISTED_S)]:
            calls = [timed(arguments, code) for _ in range(repeats)]
            clock, processor = (min(column) for column in zip(*calls))
            rows.append([f"megappo {' '.join(arguments)}", f"{clock:.2f}", f"{processor:.2f}", f"{limit:.1f}"])
    print("\n".join(table(["seconds", "clock", "CPU", "limit"], rows)))


if __name__ == "__main__":
    main()
