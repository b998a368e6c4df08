"""Pipeline of a trained role in a plan: schedule and bubble of one mini-batch."""

from __future__ import annotations

from megappo.commands.plan.estimate import Plan
from megappo.commands.plan.timeline import BACKWARD, Timeline, chunk_work, padded_micro_batches, timeline
from megappo.config.role_sections import section_of


def pipeline_of(plan: Plan, role: str) -> Timeline:
    """Schedule of an update's mini-batch of the longest sequences."""
    layout, settings = plan.layouts[role], section_of(plan.config, role)
    backward = BACKWARD + (settings.recompute == "full")  # recomputation adds a forward to every backward
    work = chunk_work(layout, plan.archs[role].num_layers)
    return timeline(layout, plan.micro_batches[role], backward=backward, work=work)


def bubble(plan: Plan, role: str) -> float:
    """Share of the time of such a mini-batch in which stages wait."""
    layout = plan.layouts[role]
    if layout.layers_per_stage:
        return pipeline_of(plan, role).bubble
    # The closed form of Narayanan et al. 2021, section 2.2, for an even split.
    count = layout.vpp * padded_micro_batches(layout, plan.micro_batches[role])
    return (layout.pp - 1) / (count + layout.pp - 1)
