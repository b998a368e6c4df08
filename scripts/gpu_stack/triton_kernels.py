"""Triton's kernels, compiled to machine code by the version that this torch pins, for every generation of GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from scripts.gpu_stack.rows import Check, Wrong, run

GROUP = "triton_kernels"
ROOT = Path(__file__).resolve().parents[2]
CAPABILITIES = (80, 90, 100, 120)


def pin_fault(requirements: Sequence[str], version: str) -> str | None:
    """Fault of this version of Triton beside a torch with these requirements; None if there is none."""
    pins = [match[1] for line in requirements if (match := re.match(r"triton\s*==\s*([\w.]+)", line))]
    if not pins:
        return "this torch pins no Triton: it is a build without CUDA"
    return None if pins == [version] else f"Triton {version} is installed, torch pins {pins[0]}: pip install triton=={pins[0]}"


def pinned() -> str:
    version = metadata.version("triton")
    fault = pin_fault(metadata.requires("torch") or [], version)
    if fault:
        raise Wrong(fault)
    return version


def coverage_fault(launched: set[str], compiled: set[str]) -> str | None:
    differing = ", ".join(sorted(launched ^ compiled))
    return f"launched in the source or compiled, but not both: {differing}" if differing else None


@cache
def compiled() -> dict[int, dict[str, int]]:
    """Compute capability -> kernel -> how many variants of it were compiled: of all in one process, as its imports take longest."""
    # A cache of its own: what another version of Triton left there would be taken for compiled.
    folder = ROOT / "build" / f"triton-{metadata.version('triton')}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_triton", *map(str, CAPABILITIES)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise Wrong((done.stderr or done.stdout).strip().splitlines()[-1])
    counts: dict[int, dict[str, int]] = {}
    for capability, name, count in (line.split() for line in done.stdout.splitlines()):
        counts.setdefault(int(capability), {})[name] = int(count)
    return counts


def compiled_for(capability: int) -> str:
    from tests.ops.test_triton_compile import kernels_in_the_source

    counts = compiled().get(capability, {})
    fault = coverage_fault(kernels_in_the_source(), set(counts))
    if fault:
        raise Wrong(fault)
    return f"{len(counts)} kernels in {sum(counts.values())} variants"


CHECKS: Sequence[Check] = (
    ("version that torch pins", pinned),
    *((f"sm_{capability}", lambda capability=capability: compiled_for(capability)) for capability in CAPABILITIES),
)

if __name__ == "__main__":
    run(GROUP, CHECKS)
