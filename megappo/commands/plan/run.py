"""Plan of a run: checks, memory, data. Every command that starts or judges a run refuses it by this plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megappo.commands.plan.estimate import Plan, bytes_of_gib, check_plan, samples_of_pass, work_out
from megappo.commands.plan.report import brief, report
from megappo.commands.plan.supervised import as_planned, head_notes, own_keys, planned_step
from megappo.commands.plan.tower import Shown, shown_in_data
from megappo.commands.prepared import device_of
from megappo.config.batch import mini_batch_key
from megappo.config.checks import Device
from megappo.config.layout_checks import trained_sections
from megappo.config.role_sections import key_of_role
from megappo.config.supervised import AnyConfig, SupervisedConfig
from megappo.trainer.prepare.checks import check_run
from megappo.trainer.prepare.data import EvaluationData
from megappo.trainer.prepare.layouts import check_values
from megappo.trainer.prepare.run import AnyData, load_data


@dataclass(frozen=True)
class PlannedRun:
    """A run that can start: its plan, its data, and notes on keys that this device does not need."""

    plan: Plan
    data: AnyData | None
    """Recorded trajectories or examples if the run reads them; None if only shapes were checked, when the run may still fail to
    start."""
    notes: tuple[str, ...]

    def report(self) -> str:
        return report(self.plan, self.data, self.notes)

    def brief(self, command: str) -> str:
        """The lines that a training prints at its start. command: prints the whole report."""
        assert self.data is not None, "a run that starts has its data"
        return brief(self.plan, self.data, self.notes, command)


def plan_run(
    config: AnyConfig,
    world_size: int,
    device: Device,
    device_memory: int | None = None,
    *,
    resume: bool = False,
    shapes_only: bool = False,
) -> PlannedRun:
    """Check a run completely without building anything. ValueError, one line, for the first mistake. `plan.config` of the result is
    what runs, or the like of it (`config.supervised_step`).
    device_memory: bytes of one GPU; None if unknown, which refuses no run for its size. resume, shapes_only: see `check_run`; with
    shapes_only, tokenizer and data may be missing too."""
    checked = check_run(config, world_size, device, resume=resume, shapes_only=shapes_only)
    planned = planned_step(config)
    where = (as_planned(config, checked.archs), as_planned(config, checked.layouts), world_size, device, device_memory)

    def planned_with(shown: Shown | None) -> Plan:
        return check_plan(replace(work_out(planned, *where, shown), is_supervised=isinstance(config, SupervisedConfig)))

    plan = planned_with(None)
    notes = (*head_notes(config), *checked.notes, *(own_keys(config, note) for note in _idle_notes(plan)))
    if shapes_only:
        only = "only shapes were looked at: tensors, tokenizer and data are unchecked and may be missing"
        return PlannedRun(plan, None, (*notes, only))
    check_values(config, checked.archs)
    data = load_data(config, checked.archs)
    if isinstance(data, EvaluationData) and data.images is not None:  # now as many and as large as they are
        plan = planned_with(shown_in_data(planned, data.images))
    return PlannedRun(plan, data, (*notes, *data.notes))


def plan_here(
    config: AnyConfig,
    ranks: int,
    gpu_memory_gib: float | None,
    *,
    resume: bool = False,
    shapes_only: bool = False,
    device: Device | None = None,
) -> PlannedRun:
    """Check and plan a run, for the GPUs of this machine, or of another with `gpu_memory_gib` or `device`."""
    how = {"resume": resume, "shapes_only": shapes_only}
    if gpu_memory_gib is not None:
        return plan_run(config, ranks, "cuda", bytes_of_gib(gpu_memory_gib), **how)
    device = device or device_of(config.run.device)
    memory = None
    if device == "cuda":
        import torch

        memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    return plan_run(config, ranks, device, memory, **how)


def _idle_notes(plan: Plan) -> Iterator[str]:
    """A line for each role, and for vLLM, with more replicas than a pass has samples."""
    trained = trained_sections(plan.config)
    for role, layout in plan.layouts.items():
        samples = samples_of_pass(plan.config, role, plan.step)
        if samples < layout.dp:
            key = mini_batch_key(plan.config, role) if role in trained else "data.prompts_per_step"
            what = "a mini-batch" if role in trained else "a step"
            fix = f"raise {key}, or {key_of_role(role)}.parallel.tp or .pp, or give it fewer ranks ({key_of_role(role)}.ranks)"
            yield f"{role}: {what} of {_samples(samples)} leaves {layout.dp - samples} of {layout.dp} replicas without work; {fix}"
    samples = plan.step.samples
    if plan.rollout is not None and not plan.is_supervised and samples < plan.replicas:
        fix = "raise data.prompts_per_step or rollout.tp, or give it fewer ranks (rollout.ranks)"
        idle = f"{plan.replicas - samples} of {plan.replicas}"
        yield f"rollout: a step of {_samples(samples)} leaves {idle} replicas without work; {fix}"


def _samples(number: int) -> str:
    return "1 sample" if number == 1 else f"{number:,} samples"
