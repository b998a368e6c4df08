"""Decisions of a job script before and after its ranks: start or resume, requeue or end.

    python -m megappo.launch.attempt begin LAUNCH_DIR CONFIG [--resume] [key=value ...]
    python -m megappo.launch.attempt end   LAUNCH_DIR --status CODE --max-requeues N CONFIG [key=value ...]

`begin` prints --resume or nothing, `end` the job's exit code; messages go to stderr.

Every start of a job's ranks is an attempt, numbered by Slurm's count of restarts. Progress is measured by checkpoints: steps
after the last one are lost to the next attempt anyway. Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.config.checks import LAUNCHES, STOPPED, check_run_dir, run_dir_of
from megappo.config.errors import ConfigError, problem
from megappo.config.loading import load_config
from megappo.config.schema import RunConfig
from megappo.launch.environment import report
from megappo.launch.failure import KILL_GRACE_S, first_failure
from megappo.launch.local import EXIT_STOPPED

EXIT_REQUEUE, EXIT_MISTAKE, EXIT_NOT_REQUEUED = 75, 2, 17
# Slurm requeues after a lost node or a preemption by itself: such attempts may start at the same step, but not for ever.
MAX_STARTS_AT_A_STEP = 3


@dataclass(frozen=True)
class Start:
    """One line of attempts.jsonl. step: checkpoint that the attempt starts from, 0 without one."""

    attempt: int
    step: int
    time: float
    nodes: str


def newest_step(run_dir: Path) -> int:
    manifest = CheckpointDirectory(run_dir / "checkpoints").newest()
    return manifest.step if manifest is not None else 0


def check_start(run: RunConfig, *, resume: bool) -> Path:
    """Directory of the run. ConfigError if a new run finds another run there, or a resumed one no checkpoint."""
    run_dir = check_run_dir(run, resume)
    if resume and newest_step(run_dir) == 0:
        fix = f"{run_dir} holds no checkpoint to resume; leave --resume out and use another name"
        raise ConfigError(problem("run.name", run.name, fix))
    return run_dir


def begin(launch_dir: Path, run: RunConfig, attempt: int, *, resume: bool) -> bool:
    """Record the start of an attempt. Returns True if it continues from a checkpoint.

    resume: True if the first attempt continues a run. Leftovers of an attempt that died before its first checkpoint are moved
    into that attempt's folder. ConfigError after MAX_STARTS_AT_A_STEP attempts at the same step, and if the first attempt finds
    another run or nothing to resume.
    """
    starts = _starts(launch_dir)
    run_dir = run_dir_of(run)
    if not starts:  # `megappo launch` has checked this, but the script may have been submitted by hand
        check_start(run, resume=resume)
    step = newest_step(run_dir)
    same = [start for start in starts if start.step == step]
    if len(same) >= MAX_STARTS_AT_A_STEP:
        raise ConfigError(f"{len(same)} attempts started at step {step} and none reached another checkpoint: not tried again")
    if starts and step == 0:  # the next attempt starts anew, and needs an empty run directory
        _set_aside(run_dir, launch_dir / f"attempt-{starts[-1].attempt}")
    folder = launch_dir / f"attempt-{attempt}"
    folder.mkdir(parents=True, exist_ok=True)
    start = Start(attempt, step, round(time.time(), 3), os.environ.get("SLURM_JOB_NODELIST", ""))
    with (launch_dir / "attempts.jsonl").open("a") as file:
        file.write(json.dumps(asdict(start)) + "\n")
    (folder / "environment.json").write_text(json.dumps(report(), indent=1) + "\n")
    return step > 0 if starts else resume


def end(launch_dir: Path, run_dir: Path, attempt: int, *, status: int, max_requeues: int) -> tuple[str, int]:
    """Last lines of the log and exit code of the job; EXIT_REQUEUE asks for a requeue. status: exit code of the ranks."""
    started_at = next(start.step for start in reversed(_starts(launch_dir)) if start.attempt == attempt)
    step = newest_step(run_dir)
    # The ranks end with 0 after a stop; a job of one rank runs `megappo train`, which ends with EXIT_STOPPED or by the signal.
    stopped = status in (0, EXIT_STOPPED, 128 + signal.SIGTERM) and (run_dir / STOPPED).exists()
    if status == 0 and not stopped:
        return f"megappo: finished; results in {run_dir}", 0
    code = EXIT_NOT_REQUEUED if stopped else status
    failure = None if stopped else first_failure(launch_dir / f"attempt-{attempt}", KILL_GRACE_S)
    if stopped:
        said = f"megappo: stopped after step {step} with a checkpoint\n"
    else:
        said = failure.report() if failure is not None else f"megappo: the ranks ended with exit code {status}\n"
    if failure is not None and failure.code == EXIT_MISTAKE:
        why, code = "a mistake in the configuration", EXIT_MISTAKE
    elif step <= started_at:  # no progress: the next attempt would start at the same step
        why = f"no checkpoint was saved since this attempt started at step {started_at}"
    elif attempt >= max_requeues:
        why = f"--max-requeues {max_requeues}; `megappo launch ... --resume` goes on after step {step}"
    else:
        return f"{said}megappo: requeue {attempt + 1} of {max_requeues}, goes on after step {step}", EXIT_REQUEUE
    return f"{said}megappo: not requeued: {why}", code


def _starts(launch_dir: Path) -> list[Start]:
    path = launch_dir / "attempts.jsonl"
    return [Start(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def _set_aside(run_dir: Path, folder: Path) -> None:
    for entry in sorted(run_dir.iterdir()) if run_dir.is_dir() else ():
        if entry.name != LAUNCHES:
            folder.mkdir(parents=True, exist_ok=True)
            names = (entry.name, *(f"{entry.name}.old{n}" for n in range(1, 10_000)))
            entry.rename(next(path for name in names if not (path := folder / name).exists()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megappo.launch.attempt", allow_abbrev=False)
    parser.add_argument("action", choices=("begin", "end"))
    parser.add_argument("launch_dir", type=Path)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--status", type=int, default=0)
    parser.add_argument("--max-requeues", type=int, default=0)
    args = parser.parse_intermixed_args(argv)  # overrides on both sides of --resume
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    try:
        run = load_config(args.config, args.overrides).run
        if args.action == "begin":
            if begin(args.launch_dir, run, attempt, resume=args.resume):
                print("--resume")
            return 0
    except ConfigError as error:
        print(f"megappo: {error}", file=sys.stderr)
        return EXIT_MISTAKE
    text, code = end(args.launch_dir, run_dir_of(run), attempt, status=args.status, max_requeues=args.max_requeues)
    print(text, file=sys.stderr)
    print(code)  # not this process's own exit code: srun, which starts it in a container, would log that as the last line
    return 0


if __name__ == "__main__":
    sys.exit(main())
