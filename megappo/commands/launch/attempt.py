"""Decisions of a job script before and after its ranks: start or resume, requeue or end.

    python -m megappo.commands.launch.attempt begin LAUNCH_DIR CONFIG [--resume]
    python -m megappo.commands.launch.attempt end   LAUNCH_DIR --status CODE --max-requeues N CONFIG

`begin` prints --resume or nothing, `end` the job's exit code; messages go to stderr.

Every start of a job's ranks is an attempt, numbered by Slurm's count of restarts; `restart.py` has the policy. Imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megappo.checkpoint.manifest import RefusedCheckpoint
from megappo.commands.launch.environment import report
from megappo.commands.launch.restart import NoProgress, newest_step, next_start, read_starts, record_start, saved_steps, set_aside
from megappo.config.errors import ConfigError, problem
from megappo.config.loading import load_run
from megappo.config.run_directory import apply_permissions, check_run_dir, run_dir_of
from megappo.config.run_sections import RunConfig
from megappo.config.supervised import AnyConfig
from megappo.runtime.ending import FAILED, MISTAKE, STOPPED, UNAVAILABLE, UNRECOVERABLE, Ended, is_stopped, record_failure
from megappo.runtime.failure import KILL_GRACE_S, Failure, first_failure
from megappo.runtime.lease import Lease, LeaseHeld, refuse_if_held
from megappo.trainer.prepare.remote_run import fetch, find_copies

REQUEUE = STOPPED  # `end` returns it for a requeue
SKIPPED = "skipped_steps"  # file of an attempt's folder, which the script hands to the ranks (`runtime/world.py`)


def check_start(run: RunConfig, *, resume: bool) -> Path:
    """Return the run directory. Raises ConfigError if a new run finds another one there, or a resumed run no checkpoint."""
    run_dir = check_run_dir(run, resume)
    if resume:
        refuse_if_held(run_dir)  # checked first, as a live run may not have saved yet
    if resume and newest_step(run_dir) == 0:
        fix = f"{run_dir} holds no checkpoint to resume; leave --resume out and use another name"
        raise ConfigError(problem("run.name", run.name, fix))
    return run_dir


def begin(launch_dir: Path, run: RunConfig, attempt: int, *, resume: bool) -> bool:
    """Record the start of an attempt; return True if it continues from a checkpoint. resume: the first attempt continues a run.
    Raises NoProgress after too many attempts, and ConfigError if the first attempt finds another run or nothing to resume."""
    starts = read_starts(launch_dir)
    run_dir = run_dir_of(run)
    if not starts:  # `megappo launch` has checked this, but the script may have been submitted by hand
        check_start(run, resume=resume)
    # Slurm itself requeues after a lost node or a preemption, without asking `end`: attempts are counted here.
    start = next_start(starts, saved_steps(run_dir), attempt)
    with Lease.acquire(run_dir, "megappo.commands.launch.attempt begin"):  # released again before the ranks take it
        if starts and start.step == 0:  # the next attempt starts anew, and needs an empty run directory
            set_aside(run_dir, launch_dir / f"attempt-{starts[-1].attempt}")
    folder = record_start(launch_dir, start)
    (folder / SKIPPED).write_text(",".join(map(str, start.skipped)), encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps(report(), indent=1) + "\n", encoding="utf-8")
    return start.step > 0 if starts else resume


def end(launch_dir: Path, run_dir: Path, attempt: int, *, status: int, max_requeues: int) -> tuple[str, int]:
    """Return the log's last lines and the job's exit code; REQUEUE asks for a requeue. status: exit code of the ranks. Raises
    RefusedCheckpoint or OSError, and writes nothing, if the files of the run have become unreadable."""
    started_at = next((start.step for start in reversed(read_starts(launch_dir)) if start.attempt == attempt), None)
    if started_at is None:
        raise RefusedCheckpoint(
            f"{launch_dir} holds no record of attempt {attempt}, which wrote one: is its file system still there?"
        )
    step = newest_step(run_dir)
    # The ranks end with 0 after a stop; a job of one rank runs `megappo train`, which ends with STOPPED.
    stopped = status in (0, STOPPED, 128 + signal.SIGTERM) and is_stopped(run_dir)
    if status == 0 and not stopped:
        return f"megappo: finished; results in {run_dir}", 0
    code = UNRECOVERABLE if stopped else status
    failure = None if stopped else first_failure(launch_dir / f"attempt-{attempt}", KILL_GRACE_S)
    if stopped:
        said = f"megappo: stopped after step {step} with a checkpoint\n"
    else:
        said = _of_the_ranks(failure, status)
        message = failure.in_one_line() if failure is not None else f"the ranks ended with exit code {status}"
        # srun's status is the highest code, also of ranks that were killed after the first failure.
        of_rank = status if failure is None or failure.code is None or status == UNRECOVERABLE else failure.code
        record_failure(run_dir, Ended("failed", step, of_rank, message))
        if of_rank in (MISTAKE, UNRECOVERABLE, UNAVAILABLE):
            code = of_rank
    if code == MISTAKE:
        why = "a mistake in the configuration"
    elif code == UNRECOVERABLE and not stopped:
        why = "it would fail again in the same way"
    elif code == UNAVAILABLE:
        why = f"mend the reward; `megappo launch ... --resume` goes on after step {step}"
    elif step <= started_at:  # no progress: the next attempt would start at the same step
        why = f"no checkpoint was saved since this attempt started at step {started_at}"
    elif attempt >= max_requeues:
        why = f"--max-requeues {max_requeues}; `megappo launch ... --resume` goes on after step {step}"
    else:
        return f"{said}megappo: requeue {attempt + 1} of {max_requeues}, goes on after step {step}", REQUEUE
    return f"{said}megappo: not requeued: {why}", code


def end_without_files(launch_dir: Path, attempt: int, error: Exception, *, status: int) -> tuple[str, int]:
    """Do as `end` when the files of the run are unreadable: report what the ranks left, as far as it can be read."""
    failure = None
    with contextlib.suppress(OSError, ValueError, KeyError):
        failure = first_failure(launch_dir / f"attempt-{attempt}", KILL_GRACE_S)
    return f"{_of_the_ranks(failure, status)}megappo: not requeued: {error}", status or FAILED


def _of_the_ranks(failure: Failure | None, status: int) -> str:
    return failure.report() if failure is not None else f"megappo: the ranks ended with exit code {status}\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megappo.commands.launch.attempt", allow_abbrev=False)
    parser.add_argument("action", choices=("begin", "end"))
    parser.add_argument("launch_dir", type=Path)
    parser.add_argument("config")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--status", type=int, default=0)
    parser.add_argument("--max-requeues", type=int, default=0)
    args = parser.parse_args(argv)
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return _begin(args, attempt) if args.action == "begin" else _end(args, attempt)


def _begin(args: argparse.Namespace, attempt: int) -> int:
    try:
        config = _config_of(args)
        if not read_starts(args.launch_dir) and (copies := find_copies(config, resume=args.resume)) is not None:
            fetch(copies, run_dir_of(config.run))
        if begin(args.launch_dir, config.run, attempt, resume=args.resume):
            print("--resume")
    except (ConfigError, RefusedCheckpoint, LeaseHeld, NoProgress) as error:
        print(f"megappo: {error}", file=sys.stderr)
        return UNRECOVERABLE if isinstance(error, NoProgress) else MISTAKE
    return 0


def _end(args: argparse.Namespace, attempt: int) -> int:
    try:
        run_dir = run_dir_of(_config_of(args).run)
        text, code = end(args.launch_dir, run_dir, attempt, status=args.status, max_requeues=args.max_requeues)
    except (ConfigError, RefusedCheckpoint, OSError) as error:  # `begin` could read these files, so the user made no mistake
        text, code = end_without_files(args.launch_dir, attempt, error, status=args.status)
    print(text, file=sys.stderr)
    print(code)  # not this process's own exit code: srun, which starts it in a container, would log that as the last line
    return 0


def _config_of(args: argparse.Namespace) -> AnyConfig:
    config = load_run(args.config)
    apply_permissions(config.run.permissions)
    return config


if __name__ == "__main__":
    sys.exit(main())
