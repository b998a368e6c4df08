"""`megappo pretrain-critic`: `megappo train` with a warm-up of the critic that is the whole run."""

from __future__ import annotations

import argparse
import json

from megappo.commands import train
from megappo.commands.parser import AddCommand, positive_int

PRETRAINING = ("critic.warmup.lam=1.0", "checkpoint.export_at_end=false")  # the policy is the one that the run starts from
FROM_RECORDS = ("telemetry.progress=[]",)  # columns of the file may be of samples, which are not there


def add_command(command: AddCommand) -> None:
    pretrain = command(
        "pretrain-critic",
        main,
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
    train.add_restarting(pretrain)


def main(args: argparse.Namespace) -> int:
    from megappo.config.loading import load_config

    name = load_config(args.config, args.overrides).run.name
    args.overrides = [
        f"trainer.steps={args.steps}",
        f"critic.warmup.steps={args.steps}",
        *([] if args.explained_variance is None else [f"critic.warmup.explained_variance={args.explained_variance}"]),
        *PRETRAINING,
        *([] if args.trajectories is None else [f"critic.warmup.trajectories={json.dumps(args.trajectories)}", *FROM_RECORDS]),
        f"run.name={name}-critic",
        *args.overrides,  # these count where both set a key
    ]
    args.replay = None
    return train.main(args)
