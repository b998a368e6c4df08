"""Checks of the paths and options of `megappo export`, before torch is imported (seconds) and weights are loaded (minutes)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.config.errors import ConfigError, problem
from megappo.config.layout_checks import trained_sections
from megappo.config.loading import load_run
from megappo.config.output_file import why_not_writable
from megappo.config.role_sections import AVERAGE
from megappo.config.run_directory import CHECKPOINTS, EXPORTED
from megappo.config.supervised import AnyConfig, SupervisedConfig
from megappo.runtime.ending import CONFIG


def check_export(run: Path, output: Path, role: str, step: int | Literal["best"] | None) -> tuple[AnyConfig, int | None]:
    """Return the run's configuration and the step to export, None for the newest valid one. ValueError for a missing run or
    checkpoint, another role, or an existing output."""
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} holds no run: {run / CONFIG} does not exist")
    directory = CheckpointDirectory(run / CHECKPOINTS)
    if not directory.path.is_dir():
        # Fine-tuning once saved none; it exported at its end.
        there = f"; its model lies in {run / EXPORTED} already" if (run / EXPORTED).is_dir() else ""
        raise ValueError(f"{run} has no checkpoints{there}")
    _require_room(output)
    config = load_run(str(run / CONFIG), [])
    averages = not isinstance(config, SupervisedConfig) and config.policy.ema is not None
    held = [*trained_sections(config), *([AVERAGE] if averages else [])]
    if role not in held:
        raise ValueError(f"--role {role}: checkpoints hold {', '.join(held)}")
    if step == "best":
        return config, _best_step(directory)
    if step is not None and step not in (there := directory.steps()):
        raise ConfigError(problem("--step", step, f"{directory.path} has no such checkpoint; steps there: {there}"))
    return config, step


def _require_room(output: Path) -> None:
    """Raise ConfigError if no directory can be made at `output`."""
    try:
        fault = "exists" if output.exists() else None
        above = next(path for path in output.absolute().parents if path.exists())
    except OSError as error:  # a name that is too long
        fault, above = error.strerror, output
    if fault is None:
        fault = why_not_writable(above) if above.is_dir() else f"{above} is not a directory"
    if fault is not None:
        raise ConfigError(problem("OUTPUT", str(output), f"{fault}; export to another directory"))


def _best_step(directory: CheckpointDirectory) -> int:
    """Step of the run's best checkpoint so far. Raises ConfigError if the run chooses none or has saved none."""
    newest = directory.newest()
    if newest is None:
        raise ConfigError(problem("--step", "best", f"{directory.path} holds no complete checkpoint"))
    if newest.best_step is None:
        fix = f"step-{newest.step} knows of none: the run has no trainer.keep_best, or no evaluation yet; name a step"
        raise ConfigError(problem("--step", "best", fix))
    return newest.best_step
