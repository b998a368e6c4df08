"""`megappo train` and `sft`: the same call starts the ranks and is a rank."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megappo.commands.arguments import positive_int
from megappo.commands.launch.options import add_max_restarts
from megappo.commands.parser import AddCommand
from megappo.commands.prepared import device_of, leave_world, local_models, plan_here, print_on_rank_0, require_device
from megappo.config.errors import ConfigError
from megappo.runtime.exit_codes import DONE
from megappo.telemetry.console import keep_console

PRETRAINING = ("critic.warmup_lam=1.0", "checkpoint.export_at_end=false")  # the policy is the one that the run starts from
FROM_RECORDS = ("telemetry.progress=[]",)  # columns of the file may be of samples, which are not there

if TYPE_CHECKING:
    from megappo.config.schema import TrainConfig
    from megappo.runtime.signals import StopRequest


def add_commands(command: AddCommand) -> None:
    train = command("train", cmd_train, "Train with PPO. Starts the ranks itself unless torchrun or srun has.")
    _add_restarting(train)
    pretrain = command(
        "pretrain-critic",
        cmd_pretrain_critic,
        "Train the critic alone, on Monte Carlo returns of responses that the policy samples without changing, or that were "
        "recorded.",
        "The run's checkpoints are for `critic.checkpoint` of the runs that follow. It is `train` with a warm-up of the critic for "
        "the whole run, a lambda of 1 and the name NAME-critic; key=value counts over these.",
    )
    pretrain.add_argument("--steps", type=positive_int, default=50, metavar="N", help="PPO steps at most (default: 50)")
    pretrain.add_argument(
        "--explained-variance",
        type=float,
        metavar="X",
        help="end the run after the first step whose values explain this share of the variance of their returns, for example 0.8",
    )
    pretrain.add_argument(
        "--trajectories",
        metavar="RUN",
        help="read the trajectories that this run recorded (telemetry.trajectories_every): nothing samples, and no other model is "
        "built",
    )
    _add_restarting(pretrain)
    command("sft", cmd_sft, "Fine-tune on demonstrations with the same engine.")


def _add_restarting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="continue the run of this name after its last checkpoint")
    add_max_restarts(parser)


def cmd_train(args: argparse.Namespace) -> int:
    from megappo.config.loading import load_config
    from megappo.runtime.signals import StopRequest
    from megappo.runtime.world import is_rank, join_srun, world_size
    from megappo.trainer.prepare.hub import local_overrides
    from megappo.trainer.prepare.inputs import check_inputs

    keep_console()
    join_srun()
    stop = StopRequest()
    if is_rank():
        _enter_rank(stop)
        if args.max_restarts:
            raise ConfigError(
                f"--max-restarts {args.max_restarts}: these ranks were started by torchrun or srun; only `megappo train` or "
                "`megappo launch --local` itself can restart them (under Slurm: --max-requeues)"
            )
    written = load_config(args.config, args.overrides)
    config = local_models(written)
    check_inputs(config, resume=args.resume)
    ranks = world_size(config.run)
    if not is_rank():
        return _start_ranks(args, config, ranks, local_overrides(written, config))
    planned = plan_here(config, ranks, None, resume=args.resume)
    print_on_rank_0(planned.report())
    from megappo.runtime.freed_memory import keep_freed_memory
    from megappo.runtime.garbage import freeze_imports
    from megappo.trainer.main import train

    keep_freed_memory()
    freeze_imports()
    assert planned.data is not None, "only a plan of shapes has no data"
    train(planned.plan.config, planned.data, resume=args.resume, stop=stop)
    leave_world()
    # After a stop too: with another code, torchrun or srun would treat the first rank to exit as failed and kill the others.
    return DONE


def _start_ranks(args: argparse.Namespace, config: TrainConfig, ranks: int, of_models: Sequence[str]) -> int:
    """Check everything here once, so that a mistake is one line and not a launcher's traceback; then start the ranks and wait.

    of_models: overrides that name directories for models of the hub.
    """
    from megappo.commands.launch.attempt import check_start
    from megappo.commands.launch.training import train_here
    from megappo.runtime.lease import held_lease
    from megappo.runtime.permissions import apply_permissions
    from megappo.trainer.prepare.remote_run import fetch, find_copies
    from megappo.trainer.prepare.surroundings import require_isolation_here, require_servers_here, require_storage

    if args.max_restarts:
        from megappo.commands.launch.submit import require_resumable

        require_resumable(config, "a restart", "--max-restarts 0")
    copies = find_copies(config, resume=args.resume)
    run_dir = check_start(config.run, resume=args.resume and copies is None)
    require_device(config.run.device)
    require_isolation_here(config)
    planned = plan_here(config, ranks, None, resume=args.resume)
    assert planned.data is not None, "only a plan of shapes has no data"
    require_servers_here(planned.data, resume=args.resume)
    require_storage(config)
    if copies is not None:
        fetch(copies, run_dir)
    apply_permissions(config.run.permissions)
    folder, command = None, ["train", args.config, *args.overrides, *of_models]
    if args.max_restarts:
        from megappo.commands.launch.submit import record

        folder = record(config, run_dir)  # before the lease, which it refuses
        # Every restart reads the recorded configuration: later edits of the file do not reach it.
        command = ["train", str(folder / "config.yaml")]
    with held_lease(run_dir, f"megappo train {args.config}"):
        return train_here(ranks, command, run_dir, resume=args.resume, max_restarts=args.max_restarts, record=folder)


def cmd_pretrain_critic(args: argparse.Namespace) -> int:
    """Train with a warm-up of the critic that is the whole run."""
    from megappo.config.loading import load_config

    name = load_config(args.config, args.overrides).run.name
    args.overrides = [
        f"trainer.steps={args.steps}",
        f"critic.warmup_steps={args.steps}",
        *([] if args.explained_variance is None else [f"critic.warmup_explained_variance={args.explained_variance}"]),
        *PRETRAINING,
        *([] if args.trajectories is None else [f"critic.warmup_trajectories={json.dumps(args.trajectories)}", *FROM_RECORDS]),
        f"run.name={name}-critic",
        *args.overrides,  # these count where both set a key
    ]
    return cmd_train(args)


def cmd_sft(args: argparse.Namespace) -> int:
    from megappo.commands.launch.training import train_here
    from megappo.config.loading import load_config
    from megappo.config.run_directory import check_run_dir
    from megappo.config.schema import SftConfig
    from megappo.runtime.failure import record_exceptions
    from megappo.runtime.lease import held_lease
    from megappo.runtime.parent import end_with_launcher
    from megappo.runtime.permissions import apply_permissions
    from megappo.runtime.world import is_rank, join_srun, world_size
    from megappo.trainer.prepare.hub import local_overrides
    from megappo.trainer.prepare.inputs import check_inputs

    keep_console()
    join_srun()
    if is_rank():
        end_with_launcher()
        record_exceptions(int(os.environ["RANK"]))
    written = load_config(args.config, args.overrides, SftConfig)
    config = local_models(written)
    check_inputs(config)
    from megappo.commands.plan.run import plan_sft

    ranks = world_size(config.run)
    if not is_rank():
        run_dir = check_run_dir(config.run, resume=False, resumable=False)
        require_device(config.run.device)
        plan_sft(config, ranks, device_of(config.run.device))
        apply_permissions(config.run.permissions)
        command = ["sft", args.config, *args.overrides, *local_overrides(written, config)]
        with held_lease(run_dir, f"megappo sft {args.config}"):
            return train_here(ranks, command, run_dir, stoppable=False)
    planned = plan_sft(config, ranks, device_of(config.run.device))
    print_on_rank_0(planned.report())
    from megappo.runtime.garbage import freeze_imports
    from megappo.trainer.sft import train_sft

    freeze_imports()
    train_sft(config, planned.data)
    return DONE


def _enter_rank(stop: StopRequest) -> None:
    """Set up signals and tracebacks of a rank, and its end with its launcher, before anything heavy is imported."""
    from megappo.runtime.failure import record_exceptions
    from megappo.runtime.parent import end_with_launcher

    end_with_launcher()
    stop.listen()
    record_exceptions(int(os.environ["RANK"]))
