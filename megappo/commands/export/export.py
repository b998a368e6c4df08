"""Export a run's checkpoint as a Hugging Face checkpoint, in one process for any layout of the run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.store import CheckpointStore
from megappo.config.errors import ConfigError, problem
from megappo.config.layout_checks import trained_sections
from megappo.config.loading import load_config
from megappo.config.output_file import why_not_writable
from megappo.config.rank_ranges import ALL
from megappo.config.role_sections import ModelConfig, ParallelConfig
from megappo.config.run_sections import TimeoutsConfig
from megappo.engine.build import RoleEngines
from megappo.engine.factory import EngineBackend
from megappo.parallel.device import select_device, start_alone
from megappo.runtime.ending import input_accepted
from megappo.trainer.average import AVERAGE, PolicyAverage
from megappo.trainer.build_roles import spec_of_role
from megappo.trainer.prepare.data import tokenizer_of
from megappo.trainer.rundir import RunDir


def export_checkpoint(
    run: str, output: str, *, role: str, step: int | Literal["best"] | None, engines: EngineBackend = RoleEngines
) -> int:
    """Export `role` of the run in directory `run` to `output`, which must not exist; return the step. role: a trained one, or ema,
    the average of the policy's weights. step: None for the newest valid one, best for that of `trainer.keep_best`. Raises
    ValueError for a missing run or checkpoint, another role, or an existing output."""
    run_dir = RunDir(Path(run))
    if not run_dir.config.is_file():
        raise ValueError(f"{run} holds no run: {run_dir.config} does not exist")
    if not run_dir.checkpoints.is_dir():
        # Fine-tuning saves no checkpoints; it exports at its end.
        there = f"; its model lies in {run_dir.export} already" if run_dir.export.is_dir() else ""
        raise ValueError(f"{run} has no checkpoints{there}")
    _require_room(Path(output))
    config = load_config(str(run_dir.config), [])
    held = [*trained_sections(config), *([AVERAGE] if config.policy.ema is not None else [])]
    if role not in held:
        raise ValueError(f"--role {role}: checkpoints hold {', '.join(held)}")
    if step == "best":
        step = _best_step(run_dir)
    spec = spec_of_role(config, "policy" if role == AVERAGE else role, None)
    alone = spec.section.model_copy(update={"parallel": ParallelConfig(), "ranks": ALL})
    # The checkpoint holds the head's weights, so its initial value does not matter.
    spec = replace(spec, section=alone, value_head="zero" if spec.value_head is not None else None)
    device = select_device("auto")
    start_alone(device)
    engine = engines(ModelConfig(impl="local"), TimeoutsConfig(), device).build(spec)
    assert engine is not None, "alone in its world"
    average = PolicyAverage(engine, 0.0, "host") if role == AVERAGE else None
    exported = CheckpointStore(run_dir.checkpoints, keep_last=1).load_weights(role, average or engine, step)
    tokenizer = tokenizer_of(config)
    with input_accepted(), nullcontext() if average is None else average.in_place():
        engine.export(Path(output), Path(spec.model), tokenizer)
    dist.destroy_process_group()
    return exported


def _require_room(output: Path) -> None:
    """Raise ConfigError if no directory can be made at `output`, before minutes of loading."""
    try:
        fault = "exists" if output.exists() else None
        above = next(path for path in output.absolute().parents if path.exists())
    except OSError as error:  # a name that is too long
        fault, above = error.strerror, output
    if fault is None:
        fault = why_not_writable(above) if above.is_dir() else f"{above} is not a directory"
    if fault is not None:
        raise ConfigError(problem("OUTPUT", str(output), f"{fault}; export to another directory"))


def _best_step(run_dir: RunDir) -> int:
    """Step of the run's best checkpoint so far. Raises ConfigError if the run chooses none or has saved none."""
    newest = CheckpointDirectory(run_dir.checkpoints).newest()
    if newest is None:
        raise ConfigError(problem("--step", "best", f"{run_dir.checkpoints} holds no complete checkpoint"))
    if newest.best_step is None:
        fix = f"step-{newest.step} knows of none: the run has no trainer.keep_best, or no evaluation yet; name a step"
        raise ConfigError(problem("--step", "best", fix))
    return newest.best_step
