"""Writes a checkpoint of a run as a Hugging Face checkpoint, in one process whatever layout the run had."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch.distributed as dist

from megappo.checkpoint.store import CheckpointStore
from megappo.config.loading import load_config
from megappo.engine.build import build_frozen
from megappo.models.hf_config import read_arch
from megappo.models.hf_export import export_pretrained
from megappo.parallel.groups import build_groups
from megappo.parallel.layout import ParallelLayout
from megappo.platform.device import select_device, start_alone
from megappo.trainer.rundir import RunDir


def export_checkpoint(run: str, output: str, *, role: Literal["policy", "critic"], step: int | None) -> int:
    """Export `role` of the run in directory `run` to `output`, which must not exist; returns the step.

    step: None takes the newest valid one.
    The run's own resolved configuration says which model it is. ValueError for a missing run, checkpoint or an existing output.
    """
    run_dir = RunDir(Path(run))
    if not run_dir.config.is_file():
        raise ValueError(f"{run} holds no run: {run_dir.config} does not exist")
    if not run_dir.checkpoints.is_dir():
        # Fine-tuning saves none, it exports at its end.
        there = f"; its model lies in {run_dir.export} already" if run_dir.export.is_dir() else ""
        raise ValueError(f"{run} has no checkpoints{there}")
    if Path(output).exists():
        raise ValueError(f"{output} exists; export to another directory")
    config = load_config(str(run_dir.config), [])
    path = config.policy.model if role == "policy" else config.critic.model or config.policy.model
    arch = read_arch(path)
    device = select_device("auto")
    start_alone(device)
    groups = build_groups(ParallelLayout(world_size=1))
    settings = config.policy if role == "policy" else config.critic
    engine = build_frozen(role, path, arch, settings, groups, device=device, value_head=role == "critic")
    exported = CheckpointStore(run_dir.checkpoints, keep_last=1).load_weights(role, engine, step)
    with engine.eval_mode():
        export_pretrained(engine.chunks, arch, groups, Path(output), Path(path))
    dist.destroy_process_group()
    return exported
