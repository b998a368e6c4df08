"""Plan of a run: checks, memory, data. Every command that starts a run, or only judges it, refuses it by the same plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megappo.commands.plan.estimate import Plan, bytes_of_gib, make_plan
from megappo.commands.plan.host_report import host_warnings
from megappo.commands.plan.idle import idle_notes
from megappo.commands.plan.memory import Counter, count_parameters
from megappo.commands.plan.report import report
from megappo.commands.prepared import device_of
from megappo.config.checks import Device
from megappo.config.schema import TrainConfig
from megappo.trainer.prepare.checks import check_run
from megappo.trainer.prepare.data import RunData
from megappo.trainer.prepare.fit import fit_if_asked
from megappo.trainer.prepare.recorded import RecordedData
from megappo.trainer.prepare.run import load_data


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
    data = load_data(config, checked.archs, train)
    return PlannedRun(plan, data, (*notes, *data.notes))


def plan_here(
    config: TrainConfig,
    ranks: int,
    gpu_memory_gib: float | None,
    *,
    resume: bool = False,
    shapes_only: bool = False,
    device: Device | None = None,
    counter: Counter | None = None,
) -> PlannedRun:
    """Check and plan a run. `gpu_memory_gib` or `device` plans for GPUs of another machine.

    shapes_only: see `plan_run`. counter: see `plan.memory.Counter`; None counts by shapes.
    """
    how = {"resume": resume, "shapes_only": shapes_only, "counter": counter or count_parameters}
    if gpu_memory_gib is not None:
        return plan_run(config, ranks, "cuda", bytes_of_gib(gpu_memory_gib), **how)
    device = device or device_of(config.run.device)
    memory = None
    if device == "cuda":
        import torch

        memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    return plan_run(config, ranks, device, memory, **how)
