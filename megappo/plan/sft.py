"""Plan of a fine-tuning: checks, and a summary of a few lines."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from megappo.config.checks import Device
from megappo.config.schema import SftConfig
from megappo.models.weight_map import hf_tensors
from megappo.prepare.checks import CheckedSft, check_sft
from megappo.prepare.data import SftData, load_sft_data
from megappo.telemetry.tables import figures


@dataclass(frozen=True)
class PlannedSft:
    """A fine-tuning that can start."""

    checked: CheckedSft
    data: SftData

    def report(self) -> str:
        arch, layout, demonstrations = self.checked.arch, self.checked.layout, self.data.demonstrations
        trainer = self.checked.config.trainer
        parameters = sum(prod(shape) for shape in hf_tensors(arch).values())
        epochs = trainer.steps * trainer.batch_size / len(demonstrations)
        lines = [
            f"policy: {arch.family} of {parameters:,} parameters, {layout} on {layout.world_size} ranks",
            f"data: {demonstrations.summary()}",
            f"run: {trainer.steps:,} steps of {trainer.batch_size:,} demonstrations = {figures(epochs)} epochs",
            *(f"note: {note}" for note in self.checked.notes),
        ]
        return "\n".join(lines) + "\n"


def plan_sft(config: SftConfig, world_size: int, device: Device) -> PlannedSft:
    """Check a fine-tuning completely, as `plan_run`."""
    checked = check_sft(config, world_size, device)
    return PlannedSft(checked, load_sft_data(config, checked.arch))
