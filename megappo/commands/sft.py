"""`megappo sft`: the same call starts the ranks and is a rank."""

from __future__ import annotations

import argparse
from math import prod
from typing import TYPE_CHECKING

from megappo.commands.parser import AddCommand
from megappo.telemetry.console import keep_console

if TYPE_CHECKING:
    from megappo.config.schema import SftTrainerConfig
    from megappo.trainer.prepare.checks import CheckedRun
    from megappo.trainer.prepare.data import SftData


def add_command(command: AddCommand) -> None:
    command("sft", main, "Fine-tune on demonstrations with the same engine.")


def main(args: argparse.Namespace) -> int:
    from megappo.runtime.world import is_rank, join_srun

    keep_console()
    join_srun()
    if is_rank():
        from megappo.commands.rank import sft_rank

        return sft_rank(args)
    return _start_ranks(args)


def _start_ranks(args: argparse.Namespace) -> int:
    from megappo.config.loading import load_config
    from megappo.config.run_directory import check_run_dir
    from megappo.config.schema import SftConfig
    from megappo.trainer.prepare.hub import local_overrides, with_local_models

    written = load_config(args.config, args.overrides, SftConfig)
    config = with_local_models(written)
    from megappo.trainer.prepare.checks import check_inputs  # late: imports numpy, and a wrong key should fail at once

    check_inputs(config)
    from megappo.commands.launch.training import train_here
    from megappo.commands.prepared import device_of, require_device
    from megappo.config.run_directory import apply_permissions
    from megappo.runtime.lease import held_lease
    from megappo.runtime.world import world_size
    from megappo.trainer.prepare.checks import check_run
    from megappo.trainer.prepare.data import load_sft_data
    from megappo.trainer.prepare.layouts import check_values

    run_dir = check_run_dir(config.run, resume=False, resumable=False)
    require_device(config.run.device)
    ranks = world_size(config.run)
    checked = check_run(config, ranks, device_of(config.run.device))
    check_values(config, checked.archs)
    data = load_sft_data(config, checked.archs["policy"])
    apply_permissions(config.run.permissions)
    command = ["sft", args.config, *args.overrides, *local_overrides(written, config)]
    with held_lease(run_dir, f"megappo sft {args.config}"):
        print(_report(config.trainer, checked, data), flush=True)
        return train_here(ranks, command, run_dir, stoppable=False)


def _report(trainer: SftTrainerConfig, checked: CheckedRun, data: SftData) -> str:
    from megappo.models.weight_map import hf_tensors
    from megappo.telemetry.tables import figures

    arch, layout = checked.archs["policy"], checked.layouts["policy"]
    parameters = sum(prod(shape) for shape in hf_tensors(arch).values())
    epochs = trainer.steps * trainer.batch_size / len(data.demonstrations)
    lines = [
        f"policy: {arch.family} of {parameters:,} parameters, {layout} on {layout.world_size} ranks",
        f"data: {data.demonstrations.summary()}",
        f"run: {trainer.steps:,} steps of {trainer.batch_size:,} demonstrations = {figures(epochs)} epochs",
        *(f"note: {note}" for note in (*checked.notes, *data.notes)),
    ]
    return "\n".join(lines) + "\n"
