"""Export a run's checkpoint as a Hugging Face checkpoint, in one process for any layout of the run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from megappo.checkpoint.store import CheckpointStore
from megappo.commands.export.inputs import check_export
from megappo.config.rank_ranges import ALL
from megappo.config.role_sections import AVERAGE, ModelConfig, ParallelConfig
from megappo.config.run_directory import CHECKPOINTS
from megappo.config.run_sections import TimeoutsConfig
from megappo.engine.build import RoleEngines
from megappo.engine.factory import EngineBackend
from megappo.parallel.device import select_device, start_alone
from megappo.runtime.ending import input_accepted
from megappo.trainer.average import PolicyAverage
from megappo.trainer.build_roles import spec_of_role
from megappo.trainer.prepare.data import tokenizer_of


def export_checkpoint(
    run: str, output: str, *, role: str, step: int | Literal["best"] | None, engines: EngineBackend = RoleEngines
) -> int:
    """Export `role` of the run in directory `run` to `output`, which must not exist; return the step. role: a trained one, or ema,
    the average of the policy's weights. step: None for the newest valid one, best for that of `trainer.keep_best`. Raises
    ValueError for a missing run or checkpoint, another role, or an existing output."""
    config, step = check_export(Path(run), Path(output), role, step)
    spec = spec_of_role(config, "policy" if role == AVERAGE else role, None)
    alone = spec.section.model_copy(update={"parallel": ParallelConfig(), "ranks": ALL})
    # The checkpoint holds the head's weights, so its initial value does not matter.
    spec = replace(spec, section=alone, value_head="zero" if spec.value_head is not None else None)
    device = select_device("auto")
    start_alone(device)
    engine = engines(ModelConfig(impl="local"), TimeoutsConfig(), device).build(spec)
    assert engine is not None, "alone in its world"
    average = PolicyAverage(engine, 0.0) if role == AVERAGE else None
    exported = CheckpointStore(Path(run) / CHECKPOINTS, keep_last=1).load_weights(role, average or engine, step)
    tokenizer = tokenizer_of(config)
    with input_accepted(), nullcontext() if average is None else average.in_place():
        engine.export(Path(output), Path(spec.model), tokenizer)
    dist.destroy_process_group()
    return exported
