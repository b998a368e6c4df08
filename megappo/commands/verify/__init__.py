"""`megappo verify`: replay the same recorded rollouts in two layouts, and print the largest differences of the results."""

from __future__ import annotations

import argparse

from megappo.commands.parser import AddCommand, positive_float, positive_int
from megappo.commands.prepared import device_of, require_device
from megappo.config.errors import ConfigError


def add_command(command: AddCommand) -> None:
    verify = command(
        "verify",
        main,
        "Measure a small version of a run in its layout and on one rank, and print where the numbers differ.",
        "The version has the run's families, layouts and algorithm and tiny random models. Printed is the largest difference of "
        "everything that must not depend on the layout: log-probs, values, advantages, losses, gradients, parameters after three "
        "steps. Reads config.json of the models, no weights and no data. Exit code: 0 if all numbers agree, 1 if some differ, "
        "2 for a configuration that cannot work.",
    )
    verify.add_argument(
        "--max-ranks",
        type=positive_int,
        default=8,
        metavar="N",
        help="most ranks to start (default: 8, and never more than there are GPUs; run.device=cpu needs none); larger layouts "
        "are halved, with a note",
    )
    verify.add_argument(
        "--tolerance",
        type=positive_float,
        default=1e-5,
        metavar="X",
        help="largest relative difference (default: 1e-5; ten times this for the parameters after the steps)",
    )
    verify.add_argument("--bisect", action="store_true", help="also measure every axis and setting alone, to find the culprit")


def main(args: argparse.Namespace) -> int:
    from megappo.config.loading import explicit_keys, load_run
    from megappo.runtime.world import is_rank
    from megappo.trainer.prepare.hub import with_local_models

    if is_rank():
        raise ConfigError("verify starts its own ranks; run it once, without torchrun (RANK and WORLD_SIZE are set here)")
    config = with_local_models(load_run(args.config, args.overrides), shapes_only=True)
    from megappo.trainer.prepare.layouts import read_archs  # late: imports numpy, and a wrong key should fail at once

    read_archs(config)
    from megappo.commands.verify.run import verify
    from megappo.config.checks import check_config
    from megappo.config.supervised import SupervisedConfig
    from megappo.config.supervised_step import step_like

    require_device(config.run.device)
    device = device_of(config.run.device)
    if isinstance(config, SupervisedConfig):
        check_config(config, explicit_keys(config), config.run.num_ranks or 1, device)
        config = step_like(config)
        print("note: measured are the passes and updates of its model in a PPO step without a critic", flush=True)
    return verify(config, device, max_ranks=args.max_ranks, tolerance=args.tolerance, bisect=args.bisect)
