"""`megappo sft` and every further kind of supervised training: `megappo train` on a file of that kind."""

from __future__ import annotations

import argparse
from functools import partial

from megappo.commands import train
from megappo.commands.parser import AddCommand

COMMANDS = {
    "sft": ("sft", "Fine-tune on demonstrations."),
    "reward_model": ("train-reward-model", "Train a reward model on preferences."),
    "dpo": ("dpo", "Train a policy on preferences: DPO, IPO, KTO, SimPO, ORPO."),
}
"""Kind (`config.supervised.KINDS`) -> its command (`SupervisedConfig.command`) and the line of that in `megappo --help`."""


def add_command(command: AddCommand) -> None:
    for kind, (name, line) in COMMANDS.items():
        train.add_restarting(command(name, partial(_main, kind=kind), line))


def _main(args: argparse.Namespace, kind: str) -> int:
    args.replay = None
    return train.main(args, kind)
