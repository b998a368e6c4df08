#!/usr/bin/env python
"""Time the answers of `megappo` that need no computation: python scripts/bench_startup.py [--repeats N]

Prints a table with the limit beside each figure (the smallest of the repeats); no figure makes it fail. CPU: user and system
seconds of the process, which other programs on the machine disturb less than the time on the clock.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megappo.arguments import positive_int
from megappo.telemetry.tables import table

RUN, SFT = "configs/quickstart.yaml", "configs/quickstart_sft.yaml"
WRONG_KEY, WRONG_VALUE = "policy.paralel.tp=2", "algorithm.gamma=2"
# The last: torch is imported before the answer is known.
HELP_S, REFUSED_S, REFUSED_AFTER_TORCH_S = 0.3, 1.5, 4.0
# arguments, exit code, limit in seconds
CASES: list[tuple[list[str], int, float]] = [
    (["--help"], 0, HELP_S),
    (["train", "--help"], 0, HELP_S),
    (["config", RUN], 0, REFUSED_S),
    *((["train", RUN, wrong], 2, REFUSED_S) for wrong in (WRONG_KEY, WRONG_VALUE)),
    (["sft", SFT, WRONG_KEY], 2, REFUSED_S),
    (["plan", RUN, WRONG_KEY], 2, REFUSED_S),
    (["launch", RUN, "--nodes", "1", "--gpus-per-node", "2", WRONG_KEY], 2, REFUSED_S),
    (["tune", RUN, "--gpu", "h100", WRONG_KEY], 2, REFUSED_S),
    (["verify", RUN, WRONG_KEY], 2, REFUSED_S),
    (["train", RUN, "policy.model=absent"], 2, REFUSED_AFTER_TORCH_S),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=positive_int, default=3, metavar="N", help="calls of each command (default: 3)")
    repeats = parser.parse_args().repeats
    rows = []
    for arguments, code, limit in CASES:
        calls = [timed(arguments, code) for _ in range(repeats)]
        clock, processor = (min(column) for column in zip(*calls))
        rows.append([f"megappo {' '.join(arguments)}", f"{clock:.2f}", f"{processor:.2f}", f"{limit:.1f}"])
    print("\n".join(table(["seconds", "clock", "CPU", "limit"], rows)))


if __name__ == "__main__":
    main()
