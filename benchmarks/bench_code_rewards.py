#!/usr/bin/env python
"""Time code rewards: python benchmarks/bench_code_rewards.py [--samples N] [--workers N]

Prints samples per second, and milliseconds of processor time of one sample, for programs that do nothing: an interpreter alone, a
sandbox with one test, with ten, and one without isolation. Processor time says more on a busy machine.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megappo.commands.parser import positive_int
from megappo.rewards.sandbox.box import Limits, Sandbox
from megappo.rewards.sandbox.bubblewrap import python
from megappo.telemetry.tables import table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=positive_int, default=40, metavar="N")
    parser.add_argument("--workers", type=positive_int, default=2, metavar="N")
    args = parser.parse_args()
    cases: dict[str, Callable[[], None]] = {
        "python -I -S -c pass": lambda: subprocess.run([python(), "-I", "-S", "-c", "pass"], check=True) and None,
        "sandbox, 1 test": lambda: run(Limits(), 1),
        "sandbox, 10 tests": lambda: run(Limits(), 10),
        "no isolation, 1 test": lambda: run(Limits(isolated=False), 1),
    }
    rows = []
    for name, case in cases.items():
        case()  # the files of the interpreter come into memory
        started, before = time.perf_counter(), cpu_s()
        with ThreadPoolExecutor(args.workers) as pool:
            for future in [pool.submit(case) for _ in range(args.samples)]:
                future.result()
        seconds = time.perf_counter() - started
        rows.append([name, f"{args.samples / seconds:.1f}", f"{(cpu_s() - before) / args.samples * 1000:.0f}"])
    print("\n".join(table(["", "samples/s", "CPU ms of a sample"], rows)))


def cpu_s() -> float:
    """Processor seconds of all processes that have been waited for, and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(limits: Limits, tests: int) -> None:
    with Sandbox(limits) as sandbox:
        for _ in range(tests):
            outcome = sandbox.run("", {"kind": "stdin", "setup": "", "source": "pass"}, 60.0)
            assert outcome.status == "exit 0", outcome


if __name__ == "__main__":
    main()
