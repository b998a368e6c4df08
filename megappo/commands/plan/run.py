"""Plan of a run: checks, memory, data; of a fine-tuning: checks, data. Every command refuses a run by the same plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from megappo.commands.plan.estimate import Plan, make_plan
from megappo.commands.plan.host_report import host_warnings
from megappo.commands.plan.idle import idle_notes
from megappo.commands.plan.memory import Counter, count_parameters
from megappo.commands.plan.report import report
from megappo.config.checks import Device
from megappo.config.layout_checks import reads_trajectories
from megappo.config.schema import SftConfig, TrainConfig
from megappo.models.weight_map import hf_tensors
from megappo.telemetry.tables import figures
from megappo.trainer.prepare.checks import CheckedSft, check_run, check_sft
from megappo.trainer.prepare.data import RunData, SftData, load_run_data, load_sft_data
from megappo.trainer.prepare.fit import fit_if_asked
from megappo.trainer.prepare.recorded import RecordedData, load_recorded_data


@dataclass(frozen=True)
class PlannedRun:
    """A run that can start: plan, data, and notes on keys that this device does not need.

    data: None if only shapes were checked; the run may then fail to start. Of recorded trajectories if the run reads them.
    """

    plan: Plan
    data: RunData | RecordedData | None
    notes: tuple[str, ...]

    def report(self) -> str:
        return report(self.plan, self.data, self.notes)


def plan_run(
    config: TrainConfig,
    world_size: int,
    device: Device,
    device_memory: int | None = None,
    *,
    resume: bool = False,
    shapes_only: bool = False,
    counter: Counter = count_parameters,
) -> PlannedRun:
    """Check a run completely without building anything. ValueError, one line, for the first mistake.

    `plan.config` of the result is what runs: its batches may have been fitted (`data.fit_batch`).

    device_memory: bytes of one GPU; None if unknown, which refuses no run for its size. resume, shapes_only: see `check_run`; with
    shapes_only, tokenizer and data may be missing too.
    """
    config, train, fitted = fit_if_asked(config, world_size, shapes_only=shapes_only)
    checked = check_run(config, world_size, device, resume=resume, shapes_only=shapes_only)
    plan = make_plan(config, checked.archs, checked.layouts, world_size, device, device_memory, counter)
    plan = replace(plan, warnings=(*plan.warnings, *host_warnings(plan)))
    notes = (*fitted, *checked.notes, *idle_notes(plan))
    if shapes_only:
        return PlannedRun(plan, None, (*notes, "only shapes were looked at: weights, tokenizer and data may be missing"))
    if reads_trajectories(config):
        recorded = load_recorded_data(config, checked.archs)
        return PlannedRun(plan, recorded, (*notes, *recorded.notes))
    data = load_run_data(config, checked.archs["policy"], train)
    return PlannedRun(plan, data, (*notes, *data.notes))


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
            *(f"note: {note}" for note in (*self.checked.notes, *self.data.notes)),
        ]
        return "\n".join(lines) + "\n"


def plan_sft(config: SftConfig, world_size: int, device: Device) -> PlannedSft:
    """Check a fine-tuning completely, as `plan_run`."""
    checked = check_sft(config, world_size, device)
    return PlannedSft(checked, load_sft_data(config, checked.arch))
