"""What is asked of Slurm before and at a submission: its partitions, whether a job still lives, and the submission itself."""

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

# Slurm may send the signal of --signal this much earlier than asked for (its man page, sbatch --signal).
SIGNAL_RESOLUTION_S = 60
_UNLIMITED = ("infinite", "unlimited", "n/a")
_LIVING = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "STAGE_OUT", "STOPPED", "SIGNALING", "RESIZING")
_REQUEUED = ("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
# Of the variables of a job, those that are the cluster's.
_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_JWT")
_PATIENCE_S = 120


@dataclass(frozen=True)
class Partition:
    """default: for jobs that name none. limit_s: longest job in seconds, None for no limit. nodes: all, in whatever state."""

    name: str
    default: bool
    up: bool
    limit_s: int | None
    nodes: int


@dataclass(frozen=True)
class JobStatus:
    """state: Slurm's, e.g. PENDING. reason: why it waits. nodes: its list, empty while it waits. code: as a shell says it."""

    state: str
    reason: str
    nodes: str
    code: int

    @property
    def is_over(self) -> bool:
        return self.state not in (*_LIVING, *_REQUEUED)


def has_slurm() -> bool:
    return shutil.which("sbatch") is not None


def partitions() -> dict[str, Partition]:
    """By name, as sinfo lists them, hidden ones too. ConfigError where Slurm does not answer."""
    rows = [line.split("|") for line in _ask("sinfo", "--all", "--noheader", "--summarize", "--format=%P|%a|%l|%D").splitlines()]
    found = [
        Partition(name.removesuffix("*"), name.endswith("*"), up == "up", parse_time(limit), int(nodes))
        for name, up, limit, nodes in rows
    ]
    return {partition.name: partition for partition in found}


def is_alive(job: str) -> bool:
    """Whether a job of this id waits or runs. ConfigError where Slurm does not answer."""
    status = job_status(job)
    return status is not None and not status.is_over


def job_status(job: str) -> JobStatus | None:
    """None for a job that Slurm does not know, or no longer (MinJobAge of slurm.conf). ConfigError where it does not answer."""
    try:
        said = _ask("scontrol", "show", "job", "--oneliner", job)
    except ConfigError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    # Reversed: of a name that comes twice the first counts, for the texts of the user's come late.
    facts = dict(word.split("=", 1) for word in reversed(said.split()) if "=" in word)
    code, _, number = facts["ExitCode"].partition(":")
    nodes = facts.get("NodeList", "").replace("(null)", "")
    return JobStatus(facts["JobState"], facts["Reason"], nodes, 128 + int(number) if int(number) else int(code))


def submit(script: Path) -> str:
    """Job id. ConfigError, with sbatch's own words, where Slurm refuses it.

    The options that the script holds are given on the command line as well: only there they count for more than SBATCH_PARTITION,
    SBATCH_TIMELIMIT and others that a site or a start-up file may export.
    """
    lines = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]
    options = [word for line in lines for word in shlex.split(line)[1:]]
    said = _ask("sbatch", "--parsable", *options, str(script), env=outside_of_a_job(os.environ))
    return said.strip().split(";")[0]


def outside_of_a_job(env: Mapping[str, str]) -> dict[str, str]:
    """Without what describes the job and the step that this process runs in: sbatch would hand it on, and srun in the new job
    would take memory, cores and bindings of the old one for its own."""
    if "SLURM_JOB_ID" not in env:
        return dict(env)
    return {name: env[name] for name in env if name in _OF_THE_CLUSTER or not name.startswith(("SLURM_", "SLURMD_", "SRUN_"))}


def parse_time(text: str) -> int | None:
    """Seconds of `minutes`, `m:s`, `h:m:s`, `d-h`, `d-h:m` or `d-h:m:s`; None for no limit. ConfigError for anything else."""
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, env=env)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"Slurm does not answer: {command[0]} took more than {_PATIENCE_S} s") from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ConfigError(f"Slurm {'refuses' if command[0] == 'sbatch' else 'does not answer'}: {said}")
    return done.stdout
