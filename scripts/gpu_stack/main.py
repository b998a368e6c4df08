"""Run the groups of checks, each in a process of its own, and print the table: check_gpu_stack.sh calls it in $venv/src.

Exit status 1 if a check FAILED. The table lists skipped checks with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from scripts.gpu_stack.rows import Row, rows_in, table

# Folder of the groups' other output.
LOGS = Path("build/gpu_stack")
# Module of scripts/gpu_stack -> seconds that it may take; a fifth of them on two free cores.
GROUPS = {
    "library": 180,
    "capability": 180,
    "triton_kernels": 600,
    "pip_resolution": 1200,  # 270 of them for 3 GB that are downloaded once
    "fake_device": 400,
    "vllm_config": 400,
    "te_layers": 400,
}


def describe_exit(returncode: int | None, limit_s: int, stderr: str) -> str:
    """Put the end of a process into words. returncode: None if the time limit ended it."""
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "")
    if returncode is None:
        return f"not done within {limit_s} s"
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}: {last}"
    return f"ended with status {returncode}: {last}"


def rows_of(group: str, limit_s: int, command: Sequence[str]) -> list[Row]:
    """Rows of one group of checks, with a last FAILED one if its process failed."""
    start = time.monotonic()
    LOGS.mkdir(parents=True, exist_ok=True)
    output, errors = LOGS / f"{group}.out", LOGS / f"{group}.err"
    with output.open("w") as stdout, errors.open("w") as stderr:
        # A session of its own, so that processes started by a check end with it.
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
        try:
            returncode: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            returncode = None
    rows, started = rows_in(output.read_text())
    if returncode != 0:
        rows.append(Row(group, started or "all of it", "FAILED", describe_exit(returncode, limit_s, errors.read_text())))
    print(f"[{time.monotonic() - start:4.0f} s] {group}", file=sys.stderr, flush=True)
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("scripts/check_gpu_stack.sh", description="Checks of the GPU stack that need no GPU.")
    parser.add_argument("--transformer-engine", action="store_true", help="compile TransformerEngine first (about 17 minutes)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--only", action="append", choices=sorted(GROUPS), help="a group; may be given again")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    chosen = [group for group in GROUPS if not options.only or group in options.only]
    with ThreadPoolExecutor(2) as pool:
        command = [sys.executable, "-W", "ignore", "-m"]
        found = pool.map(lambda group: rows_of(group, GROUPS[group], [*command, f"scripts.gpu_stack.{group}"]), chosen)
        rows = [row for group in found for row in group]
    print("\n".join(table(rows)))
    counts = {result: sum(row.result == result for row in rows) for result in ("ok", "FAILED", "skipped")}
    print(f"{', '.join(f'{count} {result}' for result, count in counts.items())} in {time.monotonic() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return int(counts["FAILED"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
