"""`megappo launch`: from the options to a job, or to the ranks of this machine. `submit.py` checks and writes."""

from __future__ import annotations

import argparse
from pathlib import Path

from megappo.commands.launch import submit
from megappo.commands.launch.attempt import check_start
from megappo.commands.launch.script import Job
from megappo.commands.launch.training import start_here
from megappo.config.errors import ConfigError
from megappo.config.loading import load_run
from megappo.config.run_directory import apply_permissions
from megappo.telemetry.console import keep_console
from megappo.trainer.prepare.hub import with_local_models
from megappo.trainer.prepare.remote_run import find_copies

MAX_RESTARTS = "--max-restarts"
# Options whose defaults are those of `script.Job`; None if not given.
JOB_DEFAULTS = ("launcher", "signal_lead_s", "max_requeues")
# Options without meaning for --local.
SLURM_ONLY = (
    *(*JOB_DEFAULTS, "nodes", "partition", "account", "time", "cpus_per_rank"),
    *("container", "mount", "setup", "sbatch", "write_to", "shapes_only"),
)


def launch(args: argparse.Namespace) -> int:
    """Submit a job to Slurm, or print its script (--dry-run), or write it (--write-to). Raises ConfigError, before anything is
    written, if it cannot work."""
    if args.max_restarts:
        raise ConfigError(
            f"launch: {MAX_RESTARTS} {args.max_restarts} goes with --local; a job of Slurm starts again by --max-requeues"
        )
    if args.mount and args.container is None:
        raise ConfigError(f"launch: --mount {args.mount[0]} has no effect without --container")
    if args.dry_run and args.write_to is not None:
        raise ConfigError("launch: --dry-run writes nothing and --write-to does; give one of them")
    target = None if args.write_to is None else Path(args.write_to).absolute()
    if target is not None and target.exists():
        raise ConfigError(f"launch: --write-to {args.write_to} exists; name a new folder")
    for option, value in (("--nodes", args.nodes), ("--gpus-per-node", args.gpus_per_node)):
        if value is None:
            raise ConfigError(f"launch: {option} is missing (how many; --local needs none)")
    written = load_run(args.config, args.overrides)
    config = with_local_models(written, shapes_only=args.shapes_only)
    from megappo.trainer.prepare.checks import check_inputs  # late: imports numpy, and a wrong key should fail at once

    check_inputs(config, resume=args.resume, shapes_only=args.shapes_only)
    from megappo.commands.plan.run import plan_here

    limits = submit.Limits(args.partition, args.account, args.time)
    job = Job(
        args.nodes,
        args.gpus_per_node,
        gpus=config.run.device != "cpu",
        cpus_per_rank=args.cpus_per_rank,
        container=args.container,
        mounts=tuple(args.mount),
        setup=tuple(args.setup),
        options=(*limits.options(), *args.sbatch),
        **{name: value for name, value in vars(args).items() if name in JOB_DEFAULTS and value is not None},
    )
    # A mistake costs seconds here and a place in the queue later, so all checks of `megappo plan` run before the submission.
    submit.check_job(config, job, limits)
    submits = not args.dry_run and target is None
    if submits:
        submit.check_cluster(job, limits)
    copies = find_copies(config, resume=args.resume)  # fetched by the job
    run_dir = check_start(config.run, resume=args.resume and copies is None)
    how = {"resume": args.resume, "shapes_only": args.shapes_only}
    planned = plan_here(config, job.world_size, args.gpu_memory_gib, **how, device="cuda" if job.gpus else "cpu")
    if submits:
        from megappo.trainer.preflight import require_storage  # imports torch

        require_storage(config)
    # Refuses names that a script cannot hold, before any is written.
    script = submit.script_of(config, job, submit.free_folder(run_dir) if target is None else target, resume=args.resume)
    if args.dry_run:
        print(script, end="")
        return 0
    apply_permissions(config.run.permissions)
    # A download of shapes alone is no model: the job is to look for the name itself.
    recorded = written if args.shapes_only else config
    if target is not None:
        submit.write_by_hand(recorded, target, script)
        _print_notes(submit.remarks(config, job, limits))
        return 0
    folder = submit.record(recorded, run_dir)
    script = submit.script_of(config, job, folder, resume=args.resume)
    job_id = submit.submit(script, folder)
    if job.gpus:  # the nodes' GPUs are unknown here: the log takes its own of all known ones
        from megappo.commands.tune.predicted import record_prediction

        record_prediction(planned, run_dir)
    print(script)
    _print_notes(submit.remarks(config, job, limits))
    print(f"job {job_id}: {job.nodes} nodes x {job.ranks_per_node} ranks, {job.launcher}")
    print(f"log:     {folder / f'job-{job_id}.log'}")
    print(f"rank 0:  {folder / 'attempt-0' / 'rank-0.log'}")
    then = "go on after a requeue" if job.max_requeues else "end"
    print(f"save, and {then}: scancel --signal=USR1 {job_id}")
    print(f"end now: scancel {job_id} (saves first, where a step and a save fit into Slurm's KillWait, 30 s by default)")
    return 0


def _print_notes(notes: list[str]) -> None:
    for note in notes:
        print(f"note: {note}")


def launch_here(args: argparse.Namespace) -> int:
    """Start the ranks on this machine, with the same record in the run directory as a Slurm job; return their exit code."""
    for name in SLURM_ONLY:
        if (value := getattr(args, name)) not in (None, [], False):
            given = "--" + name.removesuffix("_s").replace("_", "-") + ("" if value is True else f" {value}")
            raise ConfigError(f"launch: {given} does not go with --local, which starts the ranks on this machine")
    config = with_local_models(load_run(args.config, args.overrides))
    keep_console()
    holder, memory = "megappo launch --local", args.gpu_memory_gib
    return start_here(args, config, holder, ranks=args.gpus_per_node, gpu_memory_gib=memory, dry_run=args.dry_run)
