"""Requests to Slurm: list partitions, look up a job, submit a script."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megappo.config.errors import ConfigError

# Slurm may send the signal of --signal this much early (man sbatch, --signal).
SIGNAL_RESOLUTION_S = 60
_UNLIMITED = ("infinite", "unlimited", "n/a")
_LIVING = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "STAGE_OUT", "STOPPED", "SIGNALING", "RESIZING")
_REQUEUED = ("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
# Variables that describe the cluster and not a job.
_CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_JWT")
_TIMEOUT_S = 120


@dataclass(frozen=True)
class Partition:
    """One partition of the cluster."""

    name: str
    default: bool  # taken by jobs that name none
    up: bool
    limit_s: int | None  # longest job; None for no limit
    nodes: int  # in any state


def has_slurm() -> bool:
    return shutil.which("sbatch") is not None


def partitions() -> dict[str, Partition]:
    """List partitions by name, hidden ones included. Raises ConfigError if Slurm does not answer."""
    rows = [line.split("|") for line in _ask("sinfo", "--all", "--noheader", "--summarize", "--format=%P|%a|%l|%D").splitlines()]
    found = [
        Partition(name.removesuffix("*"), name.endswith("*"), up == "up", parse_time(limit), int(nodes))
        for name, up, limit, nodes in rows
    ]
    return {partition.name: partition for partition in found}


def is_alive(job: str) -> bool:
    """True if a job with this id waits or runs. Raises ConfigError if Slurm does not answer."""
    try:
        said = _ask("scontrol", "show", "job", "--oneliner", job)
    except ConfigError as error:
        if "Invalid job id" in str(error):  # Slurm does not know it, or no longer (MinJobAge)
            return False
        raise
    # The first of two equal names counts: texts of the user (job name, comment) come late.
    facts = dict(word.split("=", 1) for word in reversed(said.split()) if "=" in word)
    return facts["JobState"] in (*_LIVING, *_REQUEUED)


def submit(script: Path) -> str:
    """Submit a script and return the job id. Raises ConfigError, with sbatch's own words, if Slurm refuses it."""
    # On the command line too: #SBATCH lines yield to SBATCH_PARTITION and the like, which sites and start-up files export.
    # At \n alone, as bash and sbatch read it: str.splitlines would also split at a U+2028 within a value.
    lines = [line for line in script.read_text(encoding="utf-8").split("\n") if line.startswith("#SBATCH ")]
    options = [word for line in lines for word in shlex.split(line)[1:]]
    said = _ask("sbatch", "--parsable", *options, str(script), env=without_job_variables(os.environ))
    return said.strip().split(";")[0]


def without_job_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Copy the environment without the variables of the job and step in which this process runs."""
    # sbatch would pass them on, and srun in the new job would take the old job's memory, cores and bindings for its own.
    if "SLURM_JOB_ID" not in env:
        return dict(env)
    return {name: env[name] for name in env if name in _CLUSTER_VARIABLES or not name.startswith(("SLURM_", "SLURMD_", "SRUN_"))}


def parse_time(text: str) -> int | None:
    """Parse Slurm's `minutes`, `m:s`, `h:m:s`, `d-h`, `d-h:m` or `d-h:m:s` into seconds; None for no limit. Raises ConfigError."""
    if text.lower() in _UNLIMITED:
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ConfigError(f"--time {text}: not a time; write minutes, hours:minutes:seconds or days-hours, for example 24:00:00")
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _ask(*command: str, env: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, env=env, encoding="utf-8", errors="replace")
    except subprocess.TimeoutExpired:
        raise ConfigError(f"Slurm does not answer: {command[0]} took more than {_TIMEOUT_S} s") from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ConfigError(f"Slurm {'refuses' if command[0] == 'sbatch' else 'does not answer'}: {said}")
    return done.stdout
