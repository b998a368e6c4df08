"""Export of a run's checkpoint as a Hugging Face checkpoint, in one process for any layout of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch.distributed as dist

from megappo.checkpoint.store import CheckpointStore
from megappo.config.loading import load_config
from megappo.config.schema import ModelConfig, ParallelConfig, TimeoutsConfig
from megappo.engine.build import MegatronEngines
from megappo.engine.factory import EngineSpec
from megappo.models.hf_config import read_arch
from megappo.platform.device import select_device, start_alone
from megappo.trainer.rundir import RunDir


def export_checkpoint(run: str, output: str, *, role: Literal["policy", "critic"], step: int | None) -> int:
    """Export `role` of the run in directory `run` to `output`, which must not exist; returns the step.

    step: None takes the newest valid one. The model is that of the run's resolved configuration. ValueError for a missing run,
    a missing checkpoint or an existing output.
    """
    run_dir = RunDir(Path(run))
    if not run_dir.config.is_file():
        raise ValueError(f"{run} holds no run: {run_dir.config} does not exist")
    if not run_dir.checkpoints.is_dir():
        # Fine-tuning saves no checkpoints, it exports at its end.
        there = f"; its model lies in {run_dir.export} already" if run_dir.export.is_dir() else ""
        raise ValueError(f"{run} has no checkpoints{there}")
    if Path(output).exists():
        raise ValueError(f"{output} exists; export to another directory")
    config = load_config(str(run_dir.config), [])
    path = config.policy.model if role == "policy" else config.critic.model or config.policy.model
    section = config.policy if role == "policy" else config.critic
    spec = EngineSpec(
        role,
        path,
        read_arch(path),
        section.model_copy(update={"parallel": ParallelConfig()}),
        value_head="zero" if role == "critic" else None,
    )
    device = select_device("auto")
    start_alone(device)
    engine = MegatronEngines(ModelConfig(impl="local"), TimeoutsConfig(), device).build(spec)
    exported = CheckpointStore(run_dir.checkpoints, keep_last=1).load_weights(role, engine, step)
    engine.export(Path(output), Path(path))
    dist.destroy_process_group()
    return exported
