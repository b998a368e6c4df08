"""`megappo launch`: start a run as a Slurm job, or on this machine with the same record."""

from __future__ import annotations

import argparse

from megappo.commands.parser import AddCommand, non_negative_int, positive_float, positive_int


def add_max_restarts(parser: argparse.ArgumentParser, where: str = "") -> None:
    parser.add_argument(
        "--max-restarts",
        type=non_negative_int,
        default=0,
        metavar="N",
        help=f"{where}after a failure of any rank start all ranks again, from the newest checkpoint, at most N times (default: 0); "
        "a lost replica of an asynchronous run's sampler starts alone, as often",
    )


def add_command(command: AddCommand) -> None:
    parser = command(
        "launch",
        main,
        "Check a run here, write its job script, and submit it to Slurm.",
        "One rank per GPU. The script, the resolved configuration and the launch's environment are kept in the run directory.",
    )
    add = parser.add_argument
    add("--nodes", type=positive_int, metavar="N", help="nodes of the job")
    add("--gpus-per-node", type=positive_int, metavar="N", help="GPUs, and ranks, of a node (with run.device=cpu: ranks)")
    add("--partition", metavar="NAME", help="Slurm's partition")
    add("--account", metavar="NAME", help="Slurm's account")
    add("--time", metavar="TIME", help="longest time of one attempt, for example 24:00:00 or 2-0")
    add(
        "--launcher",
        choices=("srun", "torchrun"),
        help="srun: one task per rank (default); torchrun: one task per node, c10d rendezvous",
    )
    add(
        "--signal-lead",
        dest="signal_lead_s",
        type=positive_int,
        metavar="S",
        help="seconds before the time limit at which a checkpoint is asked for; at least the longest step plus a save "
        "(default: 180)",
    )
    add("--max-requeues", type=non_negative_int, metavar="N", help="most requeues of the job (default: 10)")
    add("--cpus-per-rank", type=positive_int, metavar="N", help="cores of a rank (default: the cluster's)")
    add("--container", metavar="IMAGE", help="run in this image: *.sif with apptainer, anything else with pyxis and enroot")
    add("--mount", action="append", default=[], metavar="HOST:CONTAINER", help="mount besides the working directory")
    add(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="a line of shell that the job runs first, e.g. --setup='module load cuda'; what it exports reaches every rank",
    )
    add("--sbatch", action="append", default=[], metavar="OPTION", help="another option of sbatch, e.g. --sbatch=--exclusive")
    add("--gpu-memory-gib", type=positive_float, metavar="GIB", help="refuse a layout that does not fit GPUs of this size")
    add("--resume", action="store_true", help="continue the run of this name after its last checkpoint")
    add("--shapes-only", action="store_true", help="check here without weights, tokenizer and data; the job checks them")
    add("--dry-run", action="store_true", help="check, and print the script; write and submit nothing")
    add("--write-to", metavar="FOLDER", help="check, and write all that a job needs into a new folder, to be submitted by hand")
    add("--local", action="store_true", help="start the ranks on this machine, without Slurm")
    add_max_restarts(parser, "with --local: ")


def main(args: argparse.Namespace) -> int:
    from megappo.commands.launch.command import launch, launch_here

    return launch_here(args) if args.local else launch(args)
