"""`megappo launch`: from the options to a job, or to the ranks of this machine. `submit.py` checks and writes."""

from __future__ import annotations

import argparse

from megappo.commands.launch import submit
from megappo.commands.launch.attempt import check_start
from megappo.commands.launch.script import Job
from megappo.commands.launch.training import start_here
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.config.run_directory import apply_permissions
from megappo.telemetry.console import keep_console
from megappo.trainer.prepare.hub import with_local_models
from megappo.trainer.prepare.remote_run import find_copies

MAX_RESTARTS = "--max-restarts"
# Options whose defaults are those of `script.Job`; None if not given.
JOB_DEFAULTS = ("launcher", "signal_lead_s", "max_requeues")
# Options without meaning for --local.
SLURM_ONLY = (*JOB_DEFAULTS, "nodes", "partition", "account", "time", "cpus_per_rank", "container", "mount", "sbatch")


def launch(args: argparse.Namespace) -> int:
    """Submit a job to Slurm, or print its script (--dry-run). Raises ConfigError, before anything is written, if it cannot work."""
    if args.max_restarts:
        raise ConfigError(
            f"launch: {MAX_RESTARTS} {args.max_restarts} goes with --local; a job of Slurm starts again by --max-requeues"
        )
    if args.mount and args.container is None:
        raise ConfigError(f"launch: --mount {args.mount[0]} has no effect without --container")
    for option, value in (("--nodes", args.nodes), ("--gpus-per-node", args.gpus_per_node)):
        if value is None:
            raise ConfigError(f"launch: {option} is missing (how many; --local needs none)")
    config = with_local_models(load_config(args.config, args.overrides))
    from megappo.trainer.prepare.checks import check_inputs  # late: imports numpy, and a wrong key should fail at once

    check_inputs(config, resume=args.resume)
    from megappo.commands.plan.run import plan_here

    limits = submit.Limits(args.partition, args.account, args.time)
    job = Job(
        args.nodes,
        args.gpus_per_node,
        gpus=config.run.device != "cpu",
        cpus_per_rank=args.cpus_per_rank,
        container=args.container,
        mounts=tuple(args.mount),
        options=(*limits.options(), *args.sbatch),
        **{name: value for name, value in vars(args).items() if name in JOB_DEFAULTS and value is not None},
    )
    # A mistake costs seconds here and a place in the queue later, so all checks of `megappo plan` run before the submission.
    submit.check_job(config, job, limits)
    if not args.dry_run:
        submit.check_cluster(job, limits)
    copies = find_copies(config, resume=args.resume)  # fetched by the job
    run_dir = check_start(config.run, resume=args.resume and copies is None)
    plan_here(config, job.world_size, args.gpu_memory_gib, resume=args.resume, device="cuda" if job.gpus else "cpu")
    if not args.dry_run:
        from megappo.trainer.preflight import require_storage  # imports torch

        require_storage(config)
    # Refuses names that a script cannot hold, before any is written.
    script = submit.print_script(config, job, run_dir, resume=args.resume)
    if args.dry_run:
        print(script, end="")
        return 0
    apply_permissions(config.run.permissions)
    folder = submit.record(config, run_dir)
    job_id = submit.submit(config, job, folder, resume=args.resume)
    print((folder / "job.sbatch").read_text(encoding="utf-8"))
    for note in submit.remarks(config, job, limits):
        print(f"note: {note}")
    print(f"job {job_id}: {job.nodes} nodes x {job.ranks_per_node} ranks, {job.launcher}")
    print(f"log:     {folder / f'job-{job_id}.log'}")
    print(f"rank 0:  {folder / 'attempt-0' / 'rank-0.log'}")
    then = "go on after a requeue" if job.max_requeues else "end"
    print(f"save, and {then}: scancel --signal=USR1 {job_id}")
    print(f"end now: scancel {job_id} (saves first, where a step and a save fit into Slurm's KillWait, 30 s by default)")
    return 0


def launch_here(args: argparse.Namespace) -> int:
    """Start the ranks on this machine, with the same record in the run directory as a Slurm job; return their exit code."""
    for name in SLURM_ONLY:
        if (value := getattr(args, name)) not in (None, []):
            option = "--" + name.removesuffix("_s").replace("_", "-")
            raise ConfigError(f"launch: {option} {value} does not go with --local, which starts the ranks on this machine")
    config = with_local_models(load_config(args.config, args.overrides))
    keep_console()
    holder, memory = "megappo launch --local", args.gpu_memory_gib
    return start_here(args, config, holder, ranks=args.gpus_per_node, gpu_memory_gib=memory, dry_run=args.dry_run)
