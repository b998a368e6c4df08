"""The pipeline of a trained role in a plan: the schedule of one mini-batch, and the share of it in which stages wait."""

from __future__ import annotations

from megappo.plan.estimate import Plan
from megappo.plan.timeline import BACKWARD, Timeline, chunk_work, padded_micro_batches, timeline

TRAINED = ("policy", "critic")


def pipeline_of(plan: Plan, role: str) -> Timeline:
    """The schedule of an update's mini-batch of the longest sequences. Recomputation of whole layers adds a forward to every
    backward.
    """
    layout, settings = plan.layouts[role], getattr(plan.config, role)
    backward = BACKWARD + (settings.recompute == "full")
    work = chunk_work(layout, plan.archs[role].num_layers)
    return timeline(layout, plan.micro_batches[role], backward=backward, work=work)


def bubble(plan: Plan, role: str) -> float:
    """Share of the time of such a mini-batch in which stages wait; without an uneven split, that of the paper (`timeline.py`)."""
    layout = plan.layouts[role]
    if layout.layers_per_stage:
        return pipeline_of(plan, role).bubble
    count = layout.vpp * padded_micro_batches(layout, plan.micro_batches[role])
    return (layout.pp - 1) / (count + layout.pp - 1)
