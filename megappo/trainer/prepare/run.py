"""Prepares a PPO run before its first model is built: the configuration to run, its data, and notes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megappo.config.checks import Device
from megappo.config.layout_checks import reads_trajectories
from megappo.config.schema import TrainConfig
from megappo.data.prompts import PromptSet
from megappo.models.arch import ModelArch
from megappo.trainer.prepare.checks import check_run
from megappo.trainer.prepare.data import RunData, load_run_data
from megappo.trainer.prepare.fit import fit_if_asked
from megappo.trainer.prepare.recorded import RecordedData, load_recorded_data


@dataclass(frozen=True)
class PreparedRun:
    """A run that can start, if it fits its memory."""

    config: TrainConfig
    """The configuration that runs, with fitted batches (`data.fit_batch`)."""
    data: RunData | RecordedData
    """Recorded trajectories if the run reads them."""
    notes: tuple[str, ...]


def prepare_run(config: TrainConfig, world_size: int, device: Device, *, resume: bool = False) -> PreparedRun:
    """Check a run and load its data, but leave its memory to `megappo plan`. ValueError, one line, for the first mistake."""
    config, train, fitted = fit_if_asked(config, world_size, shapes_only=False)
    checked = check_run(config, world_size, device, resume=resume, shapes_only=False)
    data = load_data(config, checked.archs, train)
    return PreparedRun(config, data, (*fitted, *checked.notes, *data.notes))


def load_data(config: TrainConfig, archs: Mapping[str, ModelArch], train: PromptSet | None) -> RunData | RecordedData:
    """Load the recorded trajectories of a run that reads them, else tokenizer and prompts. train: as in `load_run_data`."""
    if reads_trajectories(config):
        return load_recorded_data(config, archs)
    return load_run_data(config, archs["policy"], train)
