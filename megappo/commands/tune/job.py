"""`--measure K --slurm`: the trials as a job of Slurm, for which the command waits.

    OUTPUT_DIR/tuning/job-12.sbatch   the script; job-12.log its output; job-12.json the trials that it runs

Results are files (`trials.py`): if the wait is interrupted, the next call finds the job or its results.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megappo.commands.launch import slurm
from megappo.commands.launch.environment import REPOSITORY
from megappo.commands.launch.script import Job, shell_templates
from megappo.commands.launch.submit import Limits, check_cluster, check_options
from megappo.commands.tune.candidates import Machine
from megappo.commands.tune.trials import Outcome, read_outcome, read_trial, world_folder
from megappo.config.errors import ConfigError

POLL_S = 5.0
# Files of another node may appear late: a network file system refreshes a directory about once a minute.
LATE_S = 90.0
LAST_LINES = 15  # of the log of a job that failed
# Options of sbatch that the script sets itself -> our option that changes each; None if there is none.
OWN_OPTIONS = {
    "partition": "--partition",
    "account": "--account",
    "time": "--time",
    "nodes": "--gpus",
    "ntasks": "--gpus",
    "ntasks-per-node": "--gpus-per-node",
    "gpus-per-node": "--gpus-per-node",
    "job-name": None,
    "output": None,
    "error": None,
    "open-mode": None,
    "chdir": None,
    "array": None,
    "wrap": None,
    "parsable": None,
    "test-only": None,
}


def job_for(machine: Machine, limits: Limits, options: Sequence[str]) -> Job:
    """Describe the job that trials on this machine need. ConfigError if Slurm is missing or cannot run it."""
    per_node = machine.hardware.gpus_per_node
    nodes = -(-machine.world_size // per_node)
    own = "the trials depend on their own"
    check_options(options, {name: f"use {instead}" if instead else own for name, instead in OWN_OPTIONS.items()})
    check_options(limits.options(), {})
    if limits.time is not None:
        slurm.parse_time(limits.time)
    if not slurm.has_slurm():
        raise ConfigError("--slurm: no Slurm on this machine (sbatch is not in PATH); run this where jobs are submitted")
    named = (limits.partition or "").split(",")
    asked = [one for one in slurm.partitions().values() if one.name in named or (limits.partition is None and one.default)]
    if asked and nodes > max(one.nodes for one in asked):
        need = f"{machine.world_size} ranks are {nodes} nodes of {per_node} (--gpus, --gpus-per-node)"
        raise ConfigError(f"--partition {asked[0].name}: has {asked[0].nodes} nodes, and {need}")
    job = Job(nodes, min(machine.world_size, per_node), machine.hardware.is_gpu(), options=(*limits.options(), *options))
    check_cluster(job, limits)
    return job


def render(job: Job, folder: Path, names: Sequence[str]) -> str:
    """Text of the job script, with absolute paths."""
    environment = shell_templates(Path(__file__).parent)
    log = str(folder.absolute() / "job-").replace("%", "%%")  # sbatch replaces %j and its like in a path
    options = ["--job-name=megappo-tune", f"--output={log}%j.log", *job.options]
    return environment.get_template("trials.sbatch.jinja").render(
        options=[_in_quotes(option) for option in options],
        nodes=job.nodes,
        ranks_per_node=job.ranks_per_node,
        gpus=job.gpus,
        root=shlex.quote(str(Path.cwd())),
        code=shlex.quote(str(REPOSITORY)),
        python=shlex.quote(sys.executable),
        folder=shlex.quote(str(folder.absolute())),
        names=[shlex.quote(name) for name in names],
    )


def _in_quotes(option: str) -> str:
    # A line of #SBATCH is split at blanks and ends at #.
    return '"' + option.replace("\\", "\\\\").replace('"', '\\"') + '"'


def submit(job: Job, folder: Path, names: Sequence[str]) -> str:
    """Submit the job; returns its id. ConfigError, with sbatch's own words, if Slurm refuses it."""
    script = folder / f"{names[0]}.sbatch"
    script.write_text(render(job, folder, names), encoding="utf-8")
    try:
        job_id = slurm.submit(script)
    except ConfigError:
        script.unlink()
        raise
    script.rename(folder / f"job-{job_id}.sbatch")  # named by its id, which Slurm gives after it read the script
    (folder / f"job-{job_id}.json").write_text(json.dumps(names) + "\n", encoding="utf-8")
    return job_id


def living_jobs(folder: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """Waiting and running jobs: id -> those of `names` that the job runs."""
    found = {}
    for file in folder.glob("job-*.json"):
        theirs = set(json.loads(file.read_text(encoding="utf-8")))
        job_id, mine = file.stem.removeprefix("job-"), [name for name in names if name in theirs]
        if mine and slurm.has_slurm() and slurm.is_alive(job_id):
            found[job_id] = mine
    return found


@dataclass
class Follower:
    """Wait for a job, printing each change and each trial once."""

    job_id: str
    folder: Path
    names: Sequence[str]
    _told: set[str] = field(default_factory=set)
    _line: str = ""

    @property
    def log(self) -> Path:
        return self.folder / f"job-{self.job_id}.log"

    def wait(self) -> None:
        """Wait until the job is over. ConfigError if trials have no outcome then. KeyboardInterrupt leaves the job running."""
        try:
            while not self._is_over():
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            print(
                f"\njob {self.job_id} goes on: ask again in the same words, what it has measured by then is used; "
                f"`scancel {self.job_id}` ends it",
                flush=True,
            )
            raise

    def _is_over(self) -> bool:
        try:
            status = slurm.job_status(self.job_id)
        except ConfigError as error:  # Slurm's controller may be restarting
            self._say(f"  {error}; still asking")
            return False
        self._tell_outcomes()
        if status is not None and not status.is_over:
            self._say(_what_it_does(status))
            return False
        for name in self.names:  # left by a world that ended with the job
            shutil.rmtree(world_folder(self.folder, [name]), ignore_errors=True)
        deadline = time.monotonic() + (LATE_S if status is not None and status.state == "COMPLETED" else 0)
        while self._missing() and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self._tell_outcomes()
        if self._missing():
            raise ConfigError(self._what_went_wrong(status))
        return True

    def _missing(self) -> list[str]:
        return [name for name in self.names if name not in self._told]

    def _tell_outcomes(self) -> None:
        for name in self._missing():
            outcome: Outcome | None = read_outcome(self.folder, name)
            if outcome is not None:
                self._told.add(name)
                print(f"  {read_trial(self.folder, name).label}: {outcome}", flush=True)

    def _say(self, line: str) -> None:
        if line != self._line:
            print(line, flush=True)
            self._line = line

    def _what_went_wrong(self, status: slurm.JobStatus | None) -> str:
        """Print the end of the log, and return the reason for missing outcomes in one line."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        print("\n".join(f"  | {line}" for line in lines[-LAST_LINES:]), file=sys.stderr, flush=True)
        how = f"ended ({status.state}, exit code {status.code})" if status is not None else "is no longer known to Slurm"
        log = f"its log is {self.log}" + (", whose end is above" if lines else ", which is not there")
        kept = f"{len(self._missing())} of {len(self.names)} trials have no result, the others are kept"
        return f"--measure: job {self.job_id} {how}; {log}; {kept}; ask again to run them"


def _what_it_does(status: slurm.JobStatus) -> str:
    if status.state == "RUNNING":
        return f"  runs on {status.nodes}"
    reason = "" if status.reason == "None" else f" ({status.reason})"
    return f"  waits{reason}" if status.state == "PENDING" else f"  {status.state.lower()}{reason}"
