"""Record of a launch: code, packages, machine, and the relevant environment variables, secrets hidden."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megappo
from megappo.config.redaction import HIDDEN, hide_secrets, is_secret_name

REPOSITORY = Path(megappo.__file__).parents[1]
# Variables that change the behaviour or the place of a run; all others are left out.
SHOWN = re.compile(
    r"^(SLURM|SBATCH|SRUN|NCCL|TORCH|TORCHELASTIC|GLOO|CUDA|NVIDIA|OMP|MKL|KMP|VLLM|HF|TRANSFORMERS|PYTHON|MEGAPPO|UCX|FI|MASTER"
    r"|TRITON|RANK|WORLD|LOCAL|PYTORCH|VIRTUAL_ENV|CONDA|ENROOT|APPTAINER|SINGULARITY|LD|HOSTNAME|PATH)(_|$)"
)


def report(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Collect the record as plain data for JSON."""
    from megappo.runtime.installed import findings

    return {
        "megappo": megappo.__version__,
        "revision": revision(REPOSITORY),
        "python": f"{platform.python_version()} ({sys.executable})",
        "machine": f"{socket.gethostname()}, {platform.platform()}",
        "gpus": _lines_of("nvidia-smi", "-L"),
        "packages": {found.requirement.name: found.version for found in findings() if found.version is not None},
        "environment": shown_variables(env),
    }


def shown_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Select the relevant variables, secrets hidden."""
    return {name: HIDDEN if is_secret_name(name) else hide_secrets(env[name]) for name in sorted(env) if SHOWN.match(name)}


def revision(repository: Path) -> dict[str, Any] | None:
    """Return the commit and the changed files; None if `repository` is not the top of a git work tree."""
    found = _lines_of("git", "-C", str(repository), "rev-parse", "--show-toplevel", "HEAD")
    # An installed package may lie inside somebody else's work tree.
    if not found or Path(found[0]).resolve() != repository.resolve():
        return None
    return {"commit": found[1], "changed": _lines_of("git", "-C", str(repository), "status", "--porcelain")}


def _lines_of(*command: str) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, encoding="utf-8", errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
