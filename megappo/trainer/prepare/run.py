"""Prepares a run before its first model is built: checks, data, and notes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megappo.config.checks import Device
from megappo.config.layout_checks import reads_trajectories
from megappo.config.supervised import AnyConfig, SupervisedConfig
from megappo.models.arch import ModelArch
from megappo.trainer.prepare.checks import check_run
from megappo.trainer.prepare.data import RunData, load_run_data
from megappo.trainer.prepare.recorded import RecordedData, load_recorded_data
from megappo.trainer.prepare.supervised import SupervisedData, load_supervised_data

AnyData = RunData | RecordedData | SupervisedData
"""Data of a run of any kind."""


class PreparedRun(NamedTuple):
    """Data of a run that can start, if it fits its memory; recorded trajectories or examples if it reads them."""

    data: AnyData
    notes: tuple[str, ...]


def prepare_run(config: AnyConfig, world_size: int, device: Device, *, resume: bool = False) -> PreparedRun:
    """Check a run and load its data, but leave its memory to `megappo plan`. ValueError, one line, for the first mistake."""
    checked = check_run(config, world_size, device, resume=resume, shapes_only=False)
    data = load_data(config, checked.archs)
    return PreparedRun(data, (*checked.notes, *data.notes))


def load_data(config: AnyConfig, archs: Mapping[str, ModelArch]) -> AnyData:
    """Load the examples or recorded trajectories of a run that reads them, else tokenizer and prompts."""
    if isinstance(config, SupervisedConfig):
        return load_supervised_data(config, archs)
    if reads_trajectories(config):
        return load_recorded_data(config, archs)
    return load_run_data(config, archs["policy"])
