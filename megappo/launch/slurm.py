"""What is asked of Slurm before and at a submission: its partitions, whether a job still lives, and the submission itself."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megappo.config.errors import ConfigError

# Slurm may send the signal of --signal this much earlier than asked for (its man page, sbatch --signal).
SIGNAL_RESOLUTION_S = 60
_UNLIMITED = ("infinite", "unlimited", "n/a")


@dataclass(frozen=True)
class Partition:
    """limit_s: longest job in seconds, None for no limit. nodes: all of them, in whatever state."""

    name: str
    up: bool
    limit_s: Optional[int]
    nodes: int


def has_slurm() -> bool:
    return shutil.which("sbatch") is not None


def partitions() -> dict[str, Partition]:
    """By name, as sinfo lists them. ConfigError where Slurm does not answer."""
    rows = [line.split("|") for line in _ask("sinfo", "--noheader", "--summarize", "--format=%R|%a|%l|%D").splitlines()]
    return {name: Partition(name, up == "up", parse_time(limit), int(nodes)) for name, up, limit, nodes in rows}


def is_alive(job: str) -> bool:
    """Whether a job of this id waits or runs."""
    done = subprocess.run(["squeue", "--noheader", "--jobs", job, "--format=%i"], capture_output=True, text=True, timeout=60)
    return done.returncode == 0 and bool(done.stdout.strip())  # an id that Slurm has forgotten is an error of squeue


_LIVING = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "STAGE_OUT", "STOPPED", "SIGNALING", "RESIZING")
_REQUEUED = ("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")


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


def job_status(job: str) -> Optional[JobStatus]:
    """None for a job that Slurm does not know, or no longer (MinJobAge of slurm.conf). ConfigError where it does not answer."""
    done = subprocess.run(["scontrol", "show", "job", "--oneliner", job], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        if "Invalid job id" in done.stderr:
            return None
        raise ConfigError(f"Slurm does not answer: {' '.join(done.stderr.split())}")
    # Reversed: of a name that comes twice the first counts, for the texts of the user's come late.
    facts = dict(word.split("=", 1) for word in reversed(done.stdout.split()) if "=" in word)
    code, _, number = facts["ExitCode"].partition(":")
    nodes = facts.get("NodeList", "").replace("(null)", "")
    return JobStatus(facts["JobState"], facts["Reason"], nodes, 128 + int(number) if int(number) else int(code))


def submit(script: Path) -> str:
    """Job id. ConfigError, with sbatch's own words, where Slurm refuses it."""
    return _ask("sbatch", "--parsable", str(script)).strip().split(";")[0]


def parse_time(text: str) -> Optional[int]:
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


def _ask(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ConfigError(f"Slurm refuses: {said}")
    return done.stdout
