"""`megappo train` and `megappo launch --local` on this machine: all checks, the world of ranks, and further ones after a failure
(--max-restarts)."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.checkpoint.manifest import RefusedCheckpoint
from megappo.commands.launch.local import Requests, WorldEnd, prepare, run_world, say
from megappo.commands.launch.processes import NewProcesses, SharedImports
from megappo.commands.launch.restart import (
    NoProgress,
    Start,
    newest_step,
    next_start,
    read_starts,
    record_start,
    saved_steps,
    set_aside,
)
from megappo.config.run_directory import EXPORTED
from megappo.runtime.ending import DONE, MISTAKE, STOPPED, UNAVAILABLE, UNRECOVERABLE, Ended, is_stopped, read_end, record_failure
from megappo.runtime.failure import ATTEMPT_DIR
from megappo.runtime.verdict import VERDICT

if TYPE_CHECKING:
    from megappo.commands.plan.run import PlannedRun
    from megappo.config.supervised import AnyConfig

RANK_MODULE = "megappo.commands.cli"
# Everything a rank imports before its first step that starts no thread and opens no GPU (a test checks).
_FINAL = (DONE, MISTAKE, UNRECOVERABLE, UNAVAILABLE)  # codes after which another start is no use
PRELOADED = (
    "transformers.models.auto.modeling_auto",
    "megappo.commands.rank",
    "megappo.trainer.prepare.run",
    "megappo.trainer.main",
    "megappo.engine.megatron",
)


def start_here(
    args: argparse.Namespace,
    config: AnyConfig,
    holder: str,
    *,
    command: Sequence[str] | None = None,
    ranks: int | None = None,
    gpu_memory_gib: float | None = None,
    dry_run: bool = False,
    replay: Path | None = None,
) -> int:
    """Check a run once, start its ranks on this machine and wait for them; return the exit code. A mistake is one line here, and
    would be a traceback of every rank there.

    args: with resume and max_restarts. holder: of the run's lease. command: of the ranks; None for one that reads the configuration
    that is recorded in the run directory, which later edits of the file do not reach. ranks, gpu_memory_gib: instead of the
    configuration's and this machine's. dry_run: print the plan and start nothing. replay: directory of the run that `command`
    repeats, event by event."""
    from megappo.trainer.prepare.checks import check_inputs

    check_inputs(config, resume=args.resume)  # before anything that imports torch
    from megappo.commands.launch.attempt import check_start
    from megappo.commands.launch.submit import record, require_resumable
    from megappo.commands.plan.run import plan_here
    from megappo.commands.prepared import require_device
    from megappo.config.run_directory import apply_permissions
    from megappo.runtime.lease import held_lease
    from megappo.runtime.world import world_size
    from megappo.trainer.preflight import require_isolation_here, require_servers_here, require_storage
    from megappo.trainer.prepare.remote_run import fetch, find_copies

    if args.max_restarts:
        require_resumable(config, "a restart", "--max-restarts 0")
    copies = find_copies(config, resume=args.resume)
    run_dir = check_start(config.run, resume=args.resume and copies is None)
    if args.resume and _is_done(config, run_dir, config.trainer.steps):
        return DONE
    require_device(config.run.device)
    ranks = world_size(config.run) if ranks is None else ranks
    if not dry_run:
        require_isolation_here(config)  # before the data is read
    planned = plan_here(config, ranks, gpu_memory_gib, resume=args.resume)
    if dry_run:
        print(planned.report(), end="")
        return DONE
    assert planned.data is not None, "only a plan of shapes has no data"
    if args.resume and _is_done(config, run_dir, planned.data.total_steps):
        return DONE
    if replay is not None:
        from megappo.trainer.halves import check_replay
        from megappo.trainer.prepare.data import RunData

        assert isinstance(planned.data, RunData), "an asynchronous run has prompts"
        check_replay(planned.plan.config, planned.data, replay, ranks)
    require_servers_here(planned.data, resume=args.resume)
    require_storage(config)
    if copies is not None:
        fetch(copies, run_dir)
    apply_permissions(config.run.permissions)
    folder = None
    if command is None:
        folder = record(config, run_dir)  # before the lease, which it refuses
        command = ["train", str(folder / "config.yaml")]
    with held_lease(run_dir, holder):
        print(planned.brief(f"megappo plan {args.config}"), flush=True)
        if folder is not None:
            print(f"record:  {folder}", flush=True)
        if planned.plan.device == "cuda" or config.telemetry.hardware is not None:
            predict_here(planned, run_dir)
        return train_here(ranks, command, run_dir, resume=args.resume, max_restarts=args.max_restarts, record=folder)


def predict_here(planned: PlannedRun, run_dir: Path) -> None:
    """Predict the step on this machine for the run's log; nothing for a GPU without a profile."""
    import torch

    from megappo.commands.tune.predicted import record_prediction
    from megappo.telemetry.hardware import profile_of

    gpu = torch.cuda.get_device_name(0) if planned.plan.device == "cuda" else None
    known = profile_of(planned.plan.config.telemetry.hardware, gpu)
    record_prediction(planned, run_dir, () if known is None else (known,))


def _is_done(config: AnyConfig, run_dir: Path, steps: int | None) -> bool:
    """Say so and return True if the run has finished these steps and exported: a resume would build all models for nothing.
    steps: None while they follow from data that is not read yet."""
    end = read_end(run_dir)
    if steps is None or end is None or end.outcome != "finished" or end.step < steps:
        return False
    if config.checkpoint.export_at_end and not (run_dir / EXPORTED).exists():
        return False  # a resume writes it
    say_end = f"it finished with step {end.step} of {steps}; raise trainer.steps or trainer.epochs to go on"
    print(f"{run_dir}: nothing is left to train: {say_end}", flush=True)
    return True


def train_here(
    num_ranks: int,
    arguments: Sequence[str],
    run_dir: Path,
    *,
    resume: bool = False,
    max_restarts: int = 0,
    record: Path | None = None,
) -> int:
    """Run `megappo ARGUMENTS [--resume]` on `num_ranks` ranks; return the exit code of the command.

    After a failure all ranks start again, at most `max_restarts` times, from a checkpoint of `restart.next_start`. The code is that
    of the last failure, or 17 if further restarts are no use. record: folder of this launch below the run directory, needed for
    restarts. Raises ValueError if the machine has GPUs, but fewer than ranks.
    """
    prepare(num_ranks)
    with contextlib.ExitStack() as stack:
        requests = stack.enter_context(Requests(stoppable=True))
        if not max_restarts:
            evidence = stack.enter_context(_evidence())
            end = run_world(NewProcesses(RANK_MODULE), num_ranks, [*arguments, *_option(resume)], requests, evidence)
            say(end)
        else:
            assert record is not None, "restarts are recorded"
            imports = stack.enter_context(contextlib.closing(SharedImports(RANK_MODULE, PRELOADED, "restart")))
            end = _Restarts(num_ranks, arguments, run_dir, record, max_restarts, imports).run(requests, resume=resume)
    return conclude(end, run_dir)


@contextlib.contextmanager
def _evidence() -> Iterator[Path]:
    """Yield the folder for `failure.first_failure`: the job script's, or a temporary one that is kept after a hang."""
    if (of_job := os.environ.get(ATTEMPT_DIR)) is not None:  # a job with one rank: the job script reads its end there
        yield Path(of_job)
        return
    folder = Path(tempfile.mkdtemp(prefix="megappo-ranks-"))
    try:
        yield folder
    finally:
        if not (folder / VERDICT).exists():
            shutil.rmtree(folder)


def conclude(end: WorldEnd, run_dir: Path) -> int:
    """Record a failure in the run directory; return the exit code of the command."""
    if end.code == DONE:
        # Ranks end with 0 after a stop too: with another code torchrun and srun would kill those that are still ending.
        return STOPPED if is_stopped(run_dir) else DONE
    try:
        step = newest_step(run_dir)
    except RefusedCheckpoint:  # the disk is gone, perhaps the cause; keep the failure's exit code
        step = 0
    # A second request after everything was saved is still a stop, so its record is kept.
    record_failure(run_dir, Ended("failed", step, end.code, end.describe()))
    return end.code


class _Restarts:
    def __init__(
        self, num_ranks: int, arguments: Sequence[str], run_dir: Path, record: Path, max_restarts: int, imports: SharedImports
    ) -> None:
        self._num_ranks, self._arguments = num_ranks, list(arguments)
        self._run_dir, self._record, self._max_restarts = run_dir, record, max_restarts
        self._imports = imports

    def run(self, requests: Requests, *, resume: bool) -> WorldEnd:
        start = next_start((), saved_steps(self._run_dir), attempt=0)
        resumes = resume
        while True:
            end = self._attempt(start, requests, resumes)
            if end.code in _FINAL or end.ended_by or requests.stop or self._has_ended_since(start):
                say(end)
                return end
            how = f"megappo: {end.describe()}"
            try:
                following = next_start(read_starts(self._record), saved_steps(self._run_dir), start.attempt + 1)
            except (NoProgress, RefusedCheckpoint) as reason:
                print(f"{how}; not restarted: {reason}", file=sys.stderr, flush=True)
                # A lost disk may come back, so the run is not given up.
                return WorldEnd(UNRECOVERABLE, end.failure, at=end.at) if isinstance(reason, NoProgress) else end
            if start.attempt >= self._max_restarts:
                print(f"{how}; not restarted: --max-restarts {self._max_restarts}", file=sys.stderr, flush=True)
                return end
            start = following
            resumes = start.step > 0
            if not resumes:
                set_aside(self._run_dir, self._record / f"attempt-{start.attempt - 1}")
            place = f"from step {start.step}" if resumes else "from the beginning"
            if start.skipped:
                place += f", passing over step {', '.join(map(str, start.skipped))}"
            seconds = time.monotonic() - end.at
            print(
                f"{how}; restart {start.attempt} of {self._max_restarts} {place}, {seconds:.1f} s after the failure",
                file=sys.stderr,
                flush=True,
            )

    def _has_ended_since(self, start: Start) -> bool:
        """True if the run was over before a rank failed in its last moments."""
        recorded = read_end(self._run_dir)
        return recorded is not None and recorded.time >= start.time

    def _attempt(self, start: Start, requests: Requests, resume: bool) -> WorldEnd:
        evidence = record_start(self._record, start)
        arguments = [*self._arguments, *_option(resume)]
        starter, rejoins = self._imports.starter(), self._max_restarts
        return run_world(starter, self._num_ranks, arguments, requests, evidence, start.environment(), rejoins)


def _option(resume: bool) -> list[str]:
    return ["--resume"] if resume else []
