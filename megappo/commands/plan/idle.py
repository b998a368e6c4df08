"""Replicas that a batch leaves without work: legal, and slower than fewer ranks would be."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.commands.plan.estimate import Plan, samples_of_pass
from megappo.config.batch import mini_batch_key
from megappo.config.layout_checks import trained_sections
from megappo.config.role_sections import key_of_role


def idle_notes(plan: Plan) -> Iterator[str]:
    """A line for each role, and for vLLM, that has more replicas than a pass has samples."""
    trained = trained_sections(plan.config)
    for role, layout in plan.layouts.items():
        samples = samples_of_pass(plan.config, role, plan.step)
        if samples < layout.dp:
            key = mini_batch_key(plan.config, role) if role in trained else "data.prompts_per_step"
            what = "a mini-batch" if role in trained else "a step"
            fix = f"raise {key}, or {key_of_role(role)}.parallel.tp or .pp, or give it fewer ranks ({key_of_role(role)}.ranks)"
            yield f"{role}: {what} of {_samples(samples)} leaves {layout.dp - samples} of {layout.dp} replicas without work; {fix}"
    samples = plan.step.samples
    if plan.rollout is not None and samples < plan.replicas:
        fix = "raise data.prompts_per_step or rollout.tp, or give it fewer ranks (rollout.ranks)"
        idle = f"{plan.replicas - samples} of {plan.replicas}"
        yield f"rollout: a step of {_samples(samples)} leaves {idle} replicas without work; {fix}"


def _samples(number: int) -> str:
    return "1 sample" if number == 1 else f"{number:,} samples"
