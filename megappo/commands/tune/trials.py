"""A trial and its outcome as files: FOLDER/NAME.json and FOLDER/NAME.result.json. `trial.py` runs it.

Trials run one after the other in one world of ranks; a trial that takes its world down is followed by a new world."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from megappo.commands.launch.local import start_ranks
from megappo.commands.launch.processes import MODULE_OPTIONS
from megappo.config.errors import ConfigError
from megappo.config.schema import TrainConfig
from megappo.runtime.ending import describe_exit
from megappo.runtime.failure import Failure, error_line, first_failure

REPEATS = 3  # timed passes of each kind, of which the fastest counts
RUNNING = "running"  # file in a world's folder with the name of the current trial


class Trial(BaseModel):
    """One role of `config` in its layout there."""

    config: TrainConfig
    role: str
    label: str
    """Name that users read: the role with its layout."""
    samples: int
    """Sequences of a pass and of an update."""
    prompt_tokens: int
    response_tokens: int
    """`prompt_tokens`, `response_tokens`: of every sequence."""
    repeats: int = REPEATS


class Measured(BaseModel):
    """Seconds, the least of the repeats. Offloaded parts move once in a phase, for any number of passes and updates."""

    forward_s: float
    """A pass without gradients over the samples."""
    update_s: float | None
    """One optimizer step on the samples; None if the role does not train."""
    load_s: float = 0.0
    """Part of `forward_s`: weights that come from host memory."""
    trip_s: float = 0.0
    """Not in `update_s`: weights and optimizer state that come and go back in a phase of updates."""

    def __str__(self) -> str:
        return f"forward {self.forward_s:.4g} s" + (f", update {self.update_s:.4g} s" if self.update_s is not None else "")


class Failed(BaseModel):
    """A trial that took its world down, with the reason."""

    reason: str

    def __str__(self) -> str:
        return f"failed: {self.reason}"


Outcome = Measured | Failed
_OUTCOME: TypeAdapter[Outcome] = TypeAdapter(Outcome)


def write_trial(folder: Path, name: str, trial: Trial) -> None:
    _write(trial_file(folder, name), trial.model_dump_json())


def read_trial(folder: Path, name: str) -> Trial:
    return Trial.model_validate_json(trial_file(folder, name).read_text(encoding="utf-8"))


def trial_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def outcome_file(folder: Path, name: str) -> Path:
    """Path of a trial's outcome. A trial without this file is still to be run."""
    return folder / f"{name}.result.json"


def write_outcome(folder: Path, name: str, outcome: Outcome) -> None:
    """Write an outcome at the end of its trial, because a later trial may end the world."""
    _write(outcome_file(folder, name), outcome.model_dump_json())


def read_outcome(folder: Path, name: str) -> Outcome | None:
    """Read an outcome; None if the trial has none."""
    file = outcome_file(folder, name)
    return _OUTCOME.validate_json(file.read_text(encoding="utf-8")) if file.exists() else None


def world_folder(folder: Path, names: Sequence[str]) -> Path:
    """Folder of the world that runs these trials: the name of the current one, and evidence of failures (`runtime/failure.py`)."""
    return folder / f"{names[0]}.world"


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)  # atomic: a reader on another node never sees half of it


Start = Callable[[Path, Sequence[str]], int]
"""(folder, names of trials) -> exit code of a world that runs them."""

_INTERRUPTED = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
# A job that is cancelled, or out of time, ends its ranks and this process, but not in the same instant.
GRACE_S = 2.0
# Shell around each rank: it leaves an exit file for `first_failure`, since a rank killed for want of memory writes nothing.
RANK = """\
"$@"
code=$?
[ $code -eq 0 ] || echo "$code $(date +%s%N) $SLURM_STEP_ID $SLURMD_NODENAME" > "$0/rank-$SLURM_PROCID.exit"
exit $code"""


def run_trials(folder: Path, names: Sequence[str], start: Start) -> int:
    """Run every trial without an outcome. Returns 0, or the exit code of a world that ended outside of a trial."""
    left = _without_outcome(folder, names)
    while left:
        world = world_folder(folder, left)
        shutil.rmtree(world, ignore_errors=True)  # left by a call that was killed
        world.mkdir()
        try:
            code = start(folder, left)
            failure = first_failure(world)
            unseen = failure is None or failure.code is None  # no rank left an exit code, at most a traceback
            if unseen and code == 128 + signal.SIGTERM:  # the job was ended (preempted): no trial's fault
                return code
            if failure is not None and failure.code:  # srun reports the highest code, also of ranks that it killed
                code = failure.code
            # A rank that runs out of memory leaves the others waiting, so its world ends; the first error is the trial's outcome.
            if code != 0 and (world / RUNNING).exists():
                name, failed = (world / RUNNING).read_text(encoding="utf-8"), Failed(reason=reason_of(failure, code))
                write_outcome(folder, name, failed)
                print(f"  {read_trial(folder, name).label}: {failed}", flush=True)
        finally:
            shutil.rmtree(world)
        still = _without_outcome(folder, left)
        if len(still) == len(left):  # the world ended outside of a trial, and the next would end in the same way
            return code or 1
        left = still
    return 0


def ranks_here(num_ranks: int) -> Start:
    """Return a `Start` for worlds of `num_ranks` here. It raises KeyboardInterrupt if the user ends them or this process."""

    def start(folder: Path, names: Sequence[str]) -> int:
        code = start_ranks(num_ranks, [str(folder), *names], module="megappo.commands.tune.rank")
        if code in _INTERRUPTED:
            raise KeyboardInterrupt
        return code

    return start


def nodes_of_job() -> int:
    """Number of nodes of the job of Slurm that this process is in. ConfigError outside of one."""
    if (nodes := os.environ.get("SLURM_JOB_NUM_NODES")) is None:
        fix = "salloc --nodes N --ntasks-per-node M --gpus-per-node M megappo tune ..., or the same in a script for sbatch"
        raise ConfigError(f"--slurm: this is not in a job of Slurm; {fix}")
    return int(nodes)


def ranks_of_job(num_ranks: int, per_node: int) -> Start:
    """Return a `Start` for worlds that are steps of this job of Slurm. The first rank to fail ends the others."""
    per_node = min(num_ranks, per_node)
    shape = [f"--nodes={num_ranks // per_node}", f"--ntasks={num_ranks}", f"--ntasks-per-node={per_node}", "--distribution=block"]
    environment = dict(os.environ)
    if (cores := os.environ.get("SLURM_CPUS_PER_TASK")) is not None:
        environment["SRUN_CPUS_PER_TASK"] = cores  # since Slurm 22.05 srun does not take it over from sbatch
    cores_of_node = int(os.environ.get("SLURM_CPUS_ON_NODE", "1"))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores_of_node // per_node)))

    def start(folder: Path, names: Sequence[str]) -> int:
        rank = [sys.executable, *MODULE_OPTIONS, "megappo.commands.tune.rank", str(folder), *names]
        shell = ["bash", "-c", RANK, str(world_folder(folder, names)), *rank]
        # --export: in a job that was submitted with --export=NONE the ranks would not get the environment.
        step = subprocess.Popen(["srun", "--export=ALL", "--kill-on-bad-exit=1", *shape, *shell], env=environment)
        try:
            code = step.wait()
        except KeyboardInterrupt:
            step.terminate()  # srun ends its tasks
            step.wait()
            raise
        if code != 0:
            time.sleep(GRACE_S)
        return code

    return start


def _without_outcome(folder: Path, names: Sequence[str]) -> list[str]:
    return [name for name in names if read_outcome(folder, name) is None]


def reason_of(failure: Failure | None, code: int) -> str:
    """Reason for a failed trial. code: exit code of the rank that ended first."""
    # A killed rank prints nothing; the text then comes from a rank that lost its connection to it.
    if failure is None or (failure.code is None and code > 128):
        return f"a rank ended ({describe_exit(code)})"
    error = error_line(failure.text)
    if error is None:  # the tail of the rank's log
        return f"rank {failure.rank} on {failure.host} ended ({describe_exit(failure.code or code)})"
    return f"rank {failure.rank}: {error}"
