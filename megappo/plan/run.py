"""Plan of a run: checks, memory, data. `megappo plan`, `train` and `launch` refuse a run by the same plan."""

from __future__ import annotations

from dataclasses import dataclass

from megappo.config.checks import Device
from megappo.config.schema import TrainConfig
from megappo.plan.estimate import Plan, make_plan
from megappo.plan.memory import Counter, count_parameters
from megappo.plan.report import report
from megappo.prepare.checks import check_run
from megappo.prepare.data import RunData, load_run_data


@dataclass(frozen=True)
class PlannedRun:
    """A run that can start: plan, data, and notes on keys that this device does not need.

    data: None if only shapes were checked; the run may then fail to start.
    """

    plan: Plan
    data: RunData | None
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

    device_memory: bytes of one GPU; None if unknown, which refuses no run for its size. resume, shapes_only: see `check_run`; with
    shapes_only, tokenizer and data may be missing too.
    """
    checked = check_run(config, world_size, device, resume=resume, shapes_only=shapes_only)
    plan = make_plan(config, checked.archs, checked.layouts, world_size, device, device_memory, counter)
    if shapes_only:
        return PlannedRun(plan, None, (*checked.notes, "only shapes were looked at: weights, tokenizer and data may be missing"))
    return PlannedRun(plan, load_run_data(config, checked.archs["policy"]), checked.notes)
